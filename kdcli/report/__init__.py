"""Write report.json and its views: terminal, Markdown, HTML and model card."""
