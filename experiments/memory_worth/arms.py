"""The memories to compare: at equal keys, as far back as slots stand for, and with one setting changed."""

from dataclasses import asdict, replace

from memformers.comparison.arms import parse_arm
from memformers.comparison.text import MEMORIES
from memformers.runs.folder import Arm
from memformers.training.config import TrainConfig

SHARED = asdict(TrainConfig(model=MEMORIES))


def listed(arms: dict[str, tuple[str, ...]]) -> dict[str, Arm]:
    """The arms by their names, each from its label, its settings, and the rival with equal keys; the rival
    of those without one is no memory."""
    return {
        name: replace(parse_arm(f"{name}: {settings}", SHARED), label=label, rival="".join(rival))
        for name, (label, settings, *rival) in arms.items()
    }


XL, COMPRESSIVE = "model=transformer-xl mem_len", "model=compressive mem_len"
SLOTS = f"{COMPRESSIVE}=64 c_mem_len=192"
UPPER = f"{COMPRESSIVE}=192 c_mem_len=[0,0,128,128]"
KINDS = listed({
    "none": ("no memory", "model=transformer"),
    "xl-64": ("64 positions", f"{XL}=64"),
    "slots-32-32": ("32 positions, 32 slots", f"{COMPRESSIVE}=32 c_mem_len=32", "xl-64"),
    "xl-256": ("256 positions", f"{XL}=256"),
    "slots-64-192": ("64 positions, 192 slots", SLOTS, "xl-256"),
    "slots-64-192-c2": ("64 positions, 192 slots, c = 2", f"{SLOTS} compression_rate=2", "xl-256"),
    "slots-64-192-c8": ("64 positions, 192 slots, c = 8", f"{SLOTS} compression_rate=8", "xl-256"),
    "more-positions": ("128 positions, 128 slots", f"{COMPRESSIVE}=128 c_mem_len=128", "xl-256"),
    "most-positions": ("192 positions, 64 slots", f"{COMPRESSIVE}=192 c_mem_len=64", "xl-256"),
    "most-positions-upper": ("192 positions, slots in the upper two layers", UPPER, "xl-upper"),
    "most-positions-upper-c2": ("192 positions, slots in the upper two layers, c = 2",
                                f"{UPPER} compression_rate=2", "most-positions-upper"),
    "means-upper": ("192 positions, means in the upper two layers", f"{UPPER} compression=mean",
                    "most-positions-upper"),
    "xl-upper": ("192 positions, 320 in the upper two layers", f"{XL}=[192,192,320,320]", "xl-256"),
    "xl-832": ("832 positions", f"{XL}=832", "xl-256"),
})  # fmt: skip
"""No memory; 64 and 256 keys, as positions or with slots, c = 4 if not named otherwise, the mean over layers
where the upper two have more; and the positions that 64 positions and 192 slots cover, kept exactly."""
VARIANTS = listed({
    "xl-last": ("64 positions, 832 in the last layer", f"{XL}=[64,64,64,832]", "xl-256"),
    "start-mean": ("f_c begins as the mean", f"{SLOTS} compression_start=mean", "slots-64-192"),
    "pooling": ("f_c is the mean", f"{SLOTS} compression=mean", "slots-64-192"),
    "bptt": ("f_c learns from the next segment's loss", f"{SLOTS} compression_loss=none bptt=1",
             "slots-64-192"),
    "upper": ("slots in the upper two layers", f"{COMPRESSIVE}=64 c_mem_len=[0,0,384,384]", "slots-64-192"),
    "full-length": ("memory of full length at once", f"{SLOTS} memory_warmup=0", "slots-64-192"),
})  # fmt: skip
"""One setting changed, with the same number of keys over all layers."""
ALL = {**KINDS, **VARIANTS}
