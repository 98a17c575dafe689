"""The memories to compare: at equal keys, as far back as slots stand for, and with one setting changed."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A memory, or a way to train one."""

    settings: str
    """The settings of its arm."""
    label: str
    """In tables and figures."""
    rival: str = ""
    """The arm with as many keys that it is compared with, and so on with the rival of that one."""


def rivals_of(name: str) -> Iterator[str]:
    """Its rival, the rival of that one, and so on."""
    while name := ALL[name].rival if name in ALL else "":
        yield name


SLOTS, POSITIONS = "model=compressive mem_len=64 c_mem_len=192", "model=transformer-xl mem_len=256"
KINDS = {
    "none": Kind("model=transformer", "no memory"),
    "xl-64": Kind("model=transformer-xl mem_len=64", "64 positions"),
    "slots-32-32": Kind("model=compressive mem_len=32 c_mem_len=32", "32 positions, 32 slots", "xl-64"),
    "xl-256": Kind(POSITIONS, "256 positions"),
    "slots-64-192": Kind(SLOTS, "64 positions, 192 slots", "xl-256"),
    "slots-64-192-c2": Kind(f"{SLOTS} compression_rate=2", "64 positions, 192 slots, c = 2", "xl-256"),
    "slots-64-192-c8": Kind(f"{SLOTS} compression_rate=8", "64 positions, 192 slots, c = 8", "xl-256"),
    "more-positions": Kind(
        "model=compressive mem_len=128 c_mem_len=128", "128 positions, 128 slots", "xl-256"
    ),
    "most-positions": Kind("model=compressive mem_len=192 c_mem_len=64", "192 positions, 64 slots", "xl-256"),
    "more-positions-upper": Kind(
        "model=compressive mem_len=128 c_mem_len=[0,0,256,256]",
        "128 positions, slots in the upper two layers",
        "xl-256",
    ),
    "most-positions-upper": Kind(
        "model=compressive mem_len=192 c_mem_len=[0,0,128,128]",
        "192 positions, slots in the upper two layers",
        "xl-upper",
    ),
    "most-positions-upper-c2": Kind(
        "model=compressive mem_len=192 c_mem_len=[0,0,128,128] compression_rate=2",
        "192 positions, slots in the upper two layers, c = 2",
        "most-positions-upper",
    ),
    "means-upper": Kind(
        "model=compressive mem_len=192 c_mem_len=[0,0,128,128] compression=mean",
        "192 positions, means in the upper two layers",
        "most-positions-upper",
    ),
    "xl-upper": Kind(
        "model=transformer-xl mem_len=[192,192,320,320]",
        "192 positions, 320 in the upper two layers",
        "xl-256",
    ),
    "xl-832": Kind("model=transformer-xl mem_len=832", "832 positions", "xl-256"),
}
"""No memory; 64 and 256 keys, as positions or with slots, c = 4 if not named otherwise, the mean over layers
where the upper two have more; and as many positions as 64 positions and 192 slots stand for, which shows the
most that these slots could be worth."""
XL, FAR = "model=transformer-xl mem_len", "model=compressive mem_len=64,64,64,448 c_mem_len=0,0,0,384"
HEADS = {
    "head-832": Kind(f"{XL}=64,64,64,832", "64 positions, 832 in one head", "xl-256"),
    "head-640": Kind(f"{XL}=128,128,128,640", "128 positions, 640 in one head", "xl-256"),
    "heads-448": Kind(f"{XL}=64,64,448,448", "64 positions, 448 in two heads", "xl-256"),
    "heads-upper": Kind(
        f"{XL}='128 128 64,64,704,704 64,64,704,704'",
        "128, then 704 in two heads of the upper layers",
        "xl-256",
    ),
    "head-slots": Kind(FAR, "64 positions, 448 and 384 slots in one head", "head-832"),
    "head-slots-c16": Kind(
        f"{FAR} compression_rate=16", "64 positions, 448 and 384 slots in one head, c = 16", "head-832"
    ),
}
"""The mean over heads and layers is 256 keys; a head with 448 positions and 384 slots reaches 1,984 or, with
c = 16, 6,592 positions."""
VARIANTS = {
    "start-mean": Kind(f"{SLOTS} compression_start=mean", "f_c begins as the mean", "slots-64-192"),
    "pooling": Kind(f"{SLOTS} compression=mean", "f_c is the mean", "slots-64-192"),
    "bptt": Kind(
        f"{SLOTS} compression_loss=none bptt=1", "f_c learns from the next segment's loss", "slots-64-192"
    ),
    "both": Kind(
        f"{KINDS['most-positions-upper-c2'].settings} bptt=1",
        "f_c learns from both losses",
        "most-positions-upper-c2",
    ),
    "upper": Kind(
        "model=compressive mem_len=64 c_mem_len=[0,0,384,384]",
        "slots in the upper two layers",
        "slots-64-192",
    ),
    "full-length": Kind(f"{SLOTS} memory_warmup=0", "memory of full length at once", "slots-64-192"),
    "xl-full-length": Kind(
        f"{POSITIONS} memory_warmup=0", "256 positions, memory of full length at once", "xl-256"
    ),
}
"""One setting of an arm with as many keys over all layers changed."""
ALL = {**KINDS, **HEADS, **VARIANTS}
