"""The report of a run: one HTML page, its tables and its charts, from numbers that `figures` derives."""
