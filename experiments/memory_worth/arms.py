"""The memories to compare: at equal keys, as far back as slots stand for, and with one setting changed."""

from dataclasses import asdict, replace

from experiments.memories.selective import Selective
from memformers.comparison.arms import parse_arm
from memformers.comparison.text import MEMORIES
from memformers.models.registry import name_of
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
SLOTS, POSITIONS = f"{COMPRESSIVE}=64 c_mem_len=192", f"{XL}=256"
UPPER = f"{COMPRESSIVE}=192 c_mem_len=[0,0,128,128]"
KINDS = listed({
    "none": ("no memory", "model=transformer"),
    "xl-64": ("64 positions", f"{XL}=64"),
    "slots-32-32": ("32 positions, 32 slots", f"{COMPRESSIVE}=32 c_mem_len=32", "xl-64"),
    "xl-256": ("256 positions", POSITIONS),
    "slots-64-192": ("64 positions, 192 slots", SLOTS, "xl-256"),
    "slots-64-192-c2": ("64 positions, 192 slots, c = 2", f"{SLOTS} compression_rate=2", "xl-256"),
    "slots-64-192-c8": ("64 positions, 192 slots, c = 8", f"{SLOTS} compression_rate=8", "xl-256"),
    "more-positions": ("128 positions, 128 slots", f"{COMPRESSIVE}=128 c_mem_len=128", "xl-256"),
    "most-positions": ("192 positions, 64 slots", f"{COMPRESSIVE}=192 c_mem_len=64", "xl-256"),
    "more-positions-upper": ("128 positions, slots in the upper two layers",
                             f"{COMPRESSIVE}=128 c_mem_len=[0,0,256,256]", "xl-256"),
    "most-positions-upper": ("192 positions, slots in the upper two layers", UPPER, "xl-upper"),
    "most-positions-upper-c2": ("192 positions, slots in the upper two layers, c = 2",
                                f"{UPPER} compression_rate=2", "most-positions-upper"),
    "means-upper": ("192 positions, means in the upper two layers", f"{UPPER} compression=mean",
                    "most-positions-upper"),
    "xl-upper": ("192 positions, 320 in the upper two layers", f"{XL}=[192,192,320,320]", "xl-256"),
    "xl-832": ("832 positions", f"{XL}=832", "xl-256"),
})  # fmt: skip
"""No memory; 64 and 256 keys, as positions or with slots, c = 4 if not named otherwise, the mean over layers
where the upper two have more; and the positions that 64 positions and 192 slots cover, kept exactly: the most
that these slots could save."""
LAST = listed({
    "xl-last": ("64 positions, 832 in the last layer", f"{XL}=[64,64,64,832]", "xl-256"),
    "last-slots": ("64 positions, 448 and 384 slots in the last layer",
                   f"{COMPRESSIVE}=[64,64,64,448] c_mem_len=[0,0,0,384]", "xl-last"),
})  # fmt: skip
"""Equal keys over all layers, most of them in the last one; 448 positions with 384 slots reach 1,984."""
VARIANTS = listed({
    "start-mean": ("f_c begins as the mean", f"{SLOTS} compression_start=mean", "slots-64-192"),
    "pooling": ("f_c is the mean", f"{SLOTS} compression=mean", "slots-64-192"),
    "bptt": ("f_c learns from the next segment's loss", f"{SLOTS} compression_loss=none bptt=1",
             "slots-64-192"),
    "both": ("f_c learns from both losses", f"{UPPER} compression_rate=2 bptt=1", "most-positions-upper-c2"),
    "upper": ("slots in the upper two layers", f"{COMPRESSIVE}=64 c_mem_len=[0,0,384,384]", "slots-64-192"),
    "full-length": ("memory of full length at once", f"{SLOTS} memory_warmup=0", "slots-64-192"),
    "xl-full-length": ("256 positions, memory of full length at once", f"{POSITIONS} memory_warmup=0",
                       "xl-256"),
})  # fmt: skip
"""One setting changed, with the same number of keys over all layers."""
HALVES = {
    "selective": ("that are like no newer one", f"model={name_of(Selective)}"),
    "slots": ("slots", "model=compressive"),
    "means": ("means", "model=compressive compression=mean"),
}


def last_layer(keys: int, halves: tuple[str, ...] = tuple(HALVES)) -> dict[str, Arm]:
    """Arms whose last layer has so many keys, all newest or half of them of a kind, with and without a token
    shift; other layers have 64 positions."""
    n, found = keys // 2, {f"last-{keys}": (f"last layer: {keys} newest", f"{XL}=[64,64,64,{keys}]")}
    for kind in halves:
        label, model = HALVES[kind]
        lengths = f"mem_len=[64,64,64,{n}] c_mem_len=[0,0,0,{n}]"
        found[f"last-{n}-{kind}"] = (f"last layer: {n} newest, {n} {label}", f"{model} {lengths}")
    return listed({
        f"{name}{'-shift' * shift}": (
            label + ", token shift" * shift, settings + " token_shift=true" * shift,
            name if shift else "" if name == f"last-{keys}" else f"last-{keys}",
        )
        for name, (label, settings) in found.items() for shift in (0, 1)
    })  # fmt: skip


SHIFTED = listed({"xl-256-shift": ("256 positions, token shift", f"{POSITIONS} token_shift=true", "xl-256")})
ALL = {**KINDS, **LAST, **last_layer(256), **last_layer(832, ("selective",)), **SHIFTED, **VARIANTS}
