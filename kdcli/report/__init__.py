"""One truth, report.json, and its views: terminal, Markdown, HTML, model card."""
