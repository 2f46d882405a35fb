"""Unknown config keys: settings of a draft checkpoint that its format does not have.

## What it checks
Every key of config.json, nested ones included, against what the reader of the recognised format uses and against the
keys that are known to change nothing (training settings, library versions).

## Why it matters
A key that nobody reads may be a setting of a newer writer: a norm flag, a logit scale, another window rule. The
drafter then runs without it and is no longer the one that was trained. Norm flags and scales leave no trace in the
tensors, so nothing else would tell.

## How it is measured
The reader records each key that it looks at. What is left, is not null, and is not on the list of known keys is
reported, one warning a key. `inspect --verbose` lists the known ones with the reasons.

## Fix
Look the key up in the writer's documentation. If it changes what is computed, this version of specdoctor cannot run the
drafter as trained: please report it. If it does not, remove it from config.json or ignore the finding.

## References
- Keys that vLLM understands in draft configs: https://github.com/vllm-project/vllm
- Norm flags of EAGLE-3 that only the config has: https://github.com/vllm-project/speculators
"""

from specdoctor.checks.draft_places import finding_of
from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check
from specdoctor.measure.inspect import Inspection


def run(inspection: Inspection) -> list[Finding]:
    """One finding for each key that nothing reads and nothing explains; an error where the reader knows it matters."""
    return [
        finding_of(
            remark,
            "SD202",
            Severity.ERROR if remark.fatal else Severity.WARNING,
            "Look it up in the writer's documentation; if it changes what is computed, report it to specdoctor.",
            "config.unknown-key",
        )
        for remark in inspection.remarks
        if remark.kind == "unknown-key"
    ]


CHECK = Check("SD202", "Unknown keys in a draft checkpoint's config", "static", run)
