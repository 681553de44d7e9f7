"""famjax."""
