"""Reports: records read once into a `Summary`, shown as a table, Markdown, HTML or comparison."""

from fa_verify.report.summary import Summary, exit_code, summarise

__all__ = ["Summary", "exit_code", "summarise"]
