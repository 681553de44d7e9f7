"""One file for each experiment: `famjax train NAME` runs `configs/NAME.py`."""
