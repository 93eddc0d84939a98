# SPDX-License-Identifier: Apache-2.0
"""Parses PromQL: a JSON list of a dashboard's expressions, and a file of alert rules."""

import json
import sys

import promql_parser
import yaml

expressions = json.load(open(sys.argv[1]))
rules = [rule for group in yaml.safe_load(open(sys.argv[2]))["groups"] for rule in group["rules"]]
assert len(expressions) > 20 and len(rules) > 8, (len(expressions), len(rules))
for rule in rules:
    unknown = set(rule) - {"alert", "expr", "for", "labels", "annotations"}
    assert not unknown, f"{rule['alert']}: {unknown}"
    assert {"summary", "action"} == set(rule["annotations"]), rule["alert"]
    assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
# Grafana replaces its variables before Prometheus sees the expression.
for expression in [e.replace("$__rate_interval", "1m") for e in expressions] + [r["expr"] for r in rules]:
    promql_parser.parse(expression)
