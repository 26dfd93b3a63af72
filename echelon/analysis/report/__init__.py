"""How a report is shown: terminal, HTML page, trace."""
