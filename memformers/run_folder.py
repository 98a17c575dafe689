"""A run is a folder that holds everything about one training:

config.json      the TrainConfig
run.json         corpus, parameters, hardware, versions
metrics.jsonl    every record, as it came
labml.json       what a dashboard knows it by
labml.log        what labml said
checkpoints/     from which it goes on after whatever happened; see memformers.training.checkpoints
sample.txt       text written at the end
result.json      the last evaluation, recall by distance, time and peak memory
probe.json       what a probe measured; a comparison's is beside its runs' folders
"""

CONFIG, FACTS, METRICS, CARD, LOG = "config.json", "run.json", "metrics.jsonl", "labml.json", "labml.log"
CHECKPOINTS, SAMPLE, RESULT, PROBE = "checkpoints", "sample.txt", "result.json", "probe.json"
