# SPDX-License-Identifier: Apache-2.0
"""Reads a result as scripts around `vllm bench serve` do: by its names, types and units."""

import json
import statistics
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    result = json.load(file)

for name in ("completed", "failed", "total_input_tokens", "total_output_tokens", "num_prompts",
             "max_concurrent_requests"):
    assert isinstance(result[name], int), (name, result[name])
for name in ("duration", "request_throughput", "output_throughput", "total_token_throughput", "burstiness",
             "max_output_tokens_per_s"):
    assert isinstance(result[name], float), (name, result[name])
for name in ("date", "backend", "endpoint_type", "label", "model_id"):
    assert isinstance(result[name], str), (name, result[name])
assert result["tokenizer_id"] is None
assert result["request_rate"] == "inf" or result["request_rate"] > 0
for name in ("max_concurrency", "request_goodput"):
    assert name in result, name
for metric in ("ttft", "tpot", "itl", "e2el"):
    for figure in ("mean", "median", "std", "p90", "p95", "p99"):
        assert isinstance(result[f"{figure}_{metric}_ms"], float), (figure, metric)

count = result["num_prompts"]
for name in ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times",
             "generated_texts", "errors"):
    assert len(result[name]) == count, (name, len(result[name]))
good = [at for at in range(count) if not result["errors"][at]]
assert result["completed"] == len(good) and result["failed"] == count - len(good)
assert sum(result["output_lens"]) == result["total_output_tokens"]
assert sum(result["input_lens"]) == result["total_input_tokens"]


def close(a, b):
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b), 1e-9)


duration = result["duration"]
assert close(result["request_throughput"], len(good) / duration)
assert close(result["output_throughput"], result["total_output_tokens"] / duration)
ttfts = [result["ttfts"][at] for at in good]
assert close(result["mean_ttft_ms"], statistics.fmean(ttfts) * 1000)
assert close(result["median_ttft_ms"], statistics.median(ttfts) * 1000)
assert close(result["std_ttft_ms"], statistics.pstdev(ttfts) * 1000)
tpots = [(result["latencies"][at] - result["ttfts"][at]) / (result["output_lens"][at] - 1)
         for at in good if result["output_lens"][at] > 1]
assert close(result["mean_tpot_ms"], statistics.fmean(tpots) * 1000)
itls = [itl for at in good for itl in result["itls"][at]]
assert close(result["mean_itl_ms"], statistics.fmean(itls) * 1000)
print("accepted", len(good), "of", count)
