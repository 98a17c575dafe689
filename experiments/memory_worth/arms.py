"""The memories to compare: at equal keys, as far back as slots stand for, and with one setting changed."""

from dataclasses import asdict, replace

from memformers.comparison.arms import parse_arm
from memformers.comparison.text import MEMORIES
from memformers.runs.plan import Arm
from memformers.training.config import TrainConfig

SHARED = asdict(TrainConfig(model=MEMORIES))


def listed(arms: dict[str, tuple[str, ...]]) -> dict[str, Arm]:
    """The arms by their names, each from its settings, its label, and the rival with as many keys; the rival
    of those without one is no memory."""
    return {
        name: replace(parse_arm(f"{name}: {settings}", SHARED), label=label, rival="".join(rival))
        for name, (settings, label, *rival) in arms.items()
    }


SLOTS, POSITIONS = "model=compressive mem_len=64 c_mem_len=192", "model=transformer-xl mem_len=256"
UPPER_C2 = "model=compressive mem_len=192 c_mem_len=[0,0,128,128] compression_rate=2"
KINDS = listed(
    {
        "none": ("model=transformer", "no memory"),
        "xl-64": ("model=transformer-xl mem_len=64", "64 positions"),
        "slots-32-32": ("model=compressive mem_len=32 c_mem_len=32", "32 positions, 32 slots", "xl-64"),
        "xl-256": (POSITIONS, "256 positions"),
        "slots-64-192": (SLOTS, "64 positions, 192 slots", "xl-256"),
        "slots-64-192-c2": (f"{SLOTS} compression_rate=2", "64 positions, 192 slots, c = 2", "xl-256"),
        "slots-64-192-c8": (f"{SLOTS} compression_rate=8", "64 positions, 192 slots, c = 8", "xl-256"),
        "more-positions": (
            "model=compressive mem_len=128 c_mem_len=128",
            "128 positions, 128 slots",
            "xl-256",
        ),
        "most-positions": ("model=compressive mem_len=192 c_mem_len=64", "192 positions, 64 slots", "xl-256"),
        "more-positions-upper": (
            "model=compressive mem_len=128 c_mem_len=[0,0,256,256]",
            "128 positions, slots in the upper two layers",
            "xl-256",
        ),
        "most-positions-upper": (
            "model=compressive mem_len=192 c_mem_len=[0,0,128,128]",
            "192 positions, slots in the upper two layers",
            "xl-upper",
        ),
        "most-positions-upper-c2": (
            UPPER_C2,
            "192 positions, slots in the upper two layers, c = 2",
            "most-positions-upper",
        ),
        "means-upper": (
            "model=compressive mem_len=192 c_mem_len=[0,0,128,128] compression=mean",
            "192 positions, means in the upper two layers",
            "most-positions-upper",
        ),
        "xl-upper": (
            "model=transformer-xl mem_len=[192,192,320,320]",
            "192 positions, 320 in the upper two layers",
            "xl-256",
        ),
        "xl-832": ("model=transformer-xl mem_len=832", "832 positions", "xl-256"),
    }
)
"""No memory; 64 and 256 keys, as positions or with slots, c = 4 if not named otherwise, the mean over layers
where the upper two have more; and as many positions as 64 positions and 192 slots stand for, which shows the
most that these slots could be worth."""
XL, FAR = "model=transformer-xl mem_len", "model=compressive mem_len=64,64,64,448 c_mem_len=0,0,0,384"
HEADS = listed(
    {
        "head-832": (f"{XL}=64,64,64,832", "64 positions, 832 in one head", "xl-256"),
        "head-640": (f"{XL}=128,128,128,640", "128 positions, 640 in one head", "xl-256"),
        "heads-448": (f"{XL}=64,64,448,448", "64 positions, 448 in two heads", "xl-256"),
        "heads-upper": (
            f"{XL}='128 128 64,64,704,704 64,64,704,704'",
            "128, then 704 in two heads of the upper layers",
            "xl-256",
        ),
        "head-slots": (FAR, "64 positions, 448 and 384 slots in one head", "head-832"),
        "head-slots-c16": (
            f"{FAR} compression_rate=16",
            "64 positions, 448 and 384 slots in one head, c = 16",
            "head-832",
        ),
    }
)
"""The mean over heads and layers is 256 keys; a head with 448 positions and 384 slots reaches 1,984 or, with
c = 16, 6,592 positions."""
VARIANTS = listed(
    {
        "start-mean": (f"{SLOTS} compression_start=mean", "f_c begins as the mean", "slots-64-192"),
        "pooling": (f"{SLOTS} compression=mean", "f_c is the mean", "slots-64-192"),
        "bptt": (
            f"{SLOTS} compression_loss=none bptt=1",
            "f_c learns from the next segment's loss",
            "slots-64-192",
        ),
        "both": (
            f"{UPPER_C2} bptt=1",
            "f_c learns from both losses",
            "most-positions-upper-c2",
        ),
        "upper": (
            "model=compressive mem_len=64 c_mem_len=[0,0,384,384]",
            "slots in the upper two layers",
            "slots-64-192",
        ),
        "full-length": (f"{SLOTS} memory_warmup=0", "memory of full length at once", "slots-64-192"),
        "xl-full-length": (
            f"{POSITIONS} memory_warmup=0",
            "256 positions, memory of full length at once",
            "xl-256",
        ),
    }
)
"""One setting of an arm with as many keys over all layers changed."""
ALL = {**KINDS, **HEADS, **VARIANTS}
