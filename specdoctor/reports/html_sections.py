"""The sections of a document's part of the page.

Contract: a section exists only when the document holds its data.
"""

from specdoctor.reports.html_accept import accept_sections
from specdoctor.reports.html_bench import bench_sections
from specdoctor.reports.html_facts import run_facts
from specdoctor.reports.html_parts import Section
from specdoctor.reports.html_profile import cost_section, round_section
from specdoctor.reports.html_rows import CheckDocument, Document
from specdoctor.reports.html_rows_accept import AcceptDocument
from specdoctor.reports.html_rows_bench import BenchDocument
from specdoctor.reports.html_rows_profile import ProfileDocument


def sections(document: Document, prefix: str) -> list[Section]:
    """All sections of a document, in reading order; `prefix` keeps the ids of its figures apart."""
    found: list[Section] = []
    if isinstance(document, BenchDocument):
        found += bench_sections(document, prefix)
    if isinstance(document, AcceptDocument):
        found += accept_sections(document, prefix)
    if isinstance(document, ProfileDocument):
        found.append(round_section(document, prefix))
    if document.sps:
        found.append(cost_section(document, prefix))
    if document.findings or isinstance(document, CheckDocument):
        found.append(Section("findings", "Findings", "findings.html.j2", {}))
    run = run_facts(document)
    if any(run.values()):
        found.append(Section("run", "How it was run", "run.html.j2", run))
    return found
