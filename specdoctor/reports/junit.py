"""A gate as JUnit XML: one test case a metric, so that any CI shows it."""

from pathlib import Path

from junitparser import Failure, JUnitXml, Skipped, TestCase, TestSuite

from specdoctor.measure.gate import GateReport, MetricResult
from specdoctor.reports.gate_words import headline, notes, power, sentence


def gate_junit(report: GateReport, inconclusive: str = "fail") -> JUnitXml:
    """The report as JUnit. An undecided metric is a failure, or with `pass` and `warn` a skipped case."""
    suite = TestSuite("specdoctor gate")
    suite.add_property("outcome", report.outcome)
    suite.add_property("run", report.run.label)
    suite.add_property("baseline", report.baseline.label)
    for result in report.results:
        for name, value in _numbers(result):
            suite.add_property(f"{result.metric}.{name}", value)
        suite.add_testcase(_case(report, result, inconclusive))
    suite.update_statistics()
    xml = JUnitXml("specdoctor gate")
    xml.add_testsuite(suite)
    xml.update_statistics()
    return xml


def write_gate_junit(report: GateReport, path: Path, inconclusive: str = "fail") -> None:
    """Write the report; the file appears whole or not at all."""
    part = path.with_name(path.name + ".part")
    gate_junit(report, inconclusive).write(str(part), pretty=True)
    part.replace(path)


def _case(report: GateReport, result: MetricResult, inconclusive: str) -> TestCase:
    case = TestCase(result.metric, classname="specdoctor.gate")
    outcome = result.verdict.outcome
    if outcome == "regression":
        case.result = [Failure(sentence(result), "regression")]
    elif outcome == "inconclusive" and inconclusive == "fail":
        case.result = [Failure(sentence(result), "inconclusive")]
    elif outcome == "inconclusive":
        case.result = [Skipped(sentence(result))]
    lines = [headline(report), sentence(result), power(result), *notes(report)]
    case.system_out = "\n".join(line for line in lines if line)
    return case


def _numbers(result: MetricResult) -> list[tuple[str, str]]:
    rows = [("outcome", result.verdict.outcome), ("margin", f"{result.verdict.margin:g}")]
    if result.change is not None:
        change = result.change
        numbers = {
            "run": change.run.value,
            "baseline": change.baseline.value,
            "change": change.change.value,
            "change_low": change.change.low,
            "change_high": change.change.high,
            "minimum_detectable_effect": result.verdict.minimum_detectable_effect,
        }
        rows += [(name, f"{value:.6g}") for name, value in numbers.items() if value is not None]
    if result.verdict.further_prompts is not None:
        rows.append(("further_prompts", str(result.verdict.further_prompts)))
    return rows
