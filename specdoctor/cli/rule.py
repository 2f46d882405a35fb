"""`specdoctor rule [CODE]`: what a check looks at, why it matters, and what to do."""

import typer

app = typer.Typer()


@app.command()
def rule(
    code: str = typer.Argument("", metavar="[CODE]", help="A finding code such as SD101; all codes without it."),
    json_path: str = typer.Option("", "--json", metavar="PATH", help="Write the result as JSON; - for stdout."),
) -> None:
    """Explain a finding code, or list all codes."""
    from specdoctor.checks.registry import family, load
    from specdoctor.reports.findings import print_rule, print_rules
    from specdoctor.reports.output import stdout_console, write_json

    checks = [load(code)] if code else family("SD")
    rules = [{"code": c.code, "title": c.title, "cost": c.cost, "documentation": c.documentation} for c in checks]
    if json_path:
        write_json({"schema_version": 1, "command": "rule", "rules": rules}, json_path)
    if json_path == "-":
        return
    if code:
        print_rule(**rules[0], console=stdout_console())
    else:
        print_rules(rules, stdout_console())
