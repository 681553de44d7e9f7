"""Documents with questions in files of JSON lines: NarrativeQA, Qasper, QuALITY and others."""
