"""Long documents with facts in filler, and questions about them: RULER's families."""
