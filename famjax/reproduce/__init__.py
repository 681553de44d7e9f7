"""The experiments of the three papers, which `famjax reproduce` runs."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment
from famjax.reproduce.fam_figure_3 import FAM_FIGURE_3, FAM_FIGURE_3_GRADIENT
from famjax.reproduce.fam_figure_4 import FAM_FIGURE_4
from famjax.reproduce.fam_figure_6 import FAM_FIGURE_6
from famjax.reproduce.fam_figure_7 import FAM_FIGURE_7
from famjax.reproduce.fam_figure_8 import FAM_FIGURE_8
from famjax.reproduce.fam_figure_10 import FAM_FIGURE_10
from famjax.reproduce.fam_losses import FAM_DIVERSITY, FAM_RECONSTRUCTION
from famjax.reproduce.fam_recipe import FAM_RECIPE
from famjax.reproduce.fam_table_3 import FAM_TABLE_3
from famjax.reproduce.fam_table_4 import FAM_TABLE_4
from famjax.reproduce.fam_table_7 import FAM_TABLE_7
from famjax.reproduce.fam_table_8 import FAM_TABLE_8
from famjax.reproduce.fam_table_9 import FAM_TABLE_9
from famjax.reproduce.ft_figure_4_translation import FT_FIGURE_4_TRANSLATION
from famjax.reproduce.ft_figure_5 import FT_FIGURE_5
from famjax.reproduce.ft_figure_7_translation import FT_FIGURE_7_TRANSLATION
from famjax.reproduce.ft_figure_8 import FT_FIGURE_8
from famjax.reproduce.ft_figure_9 import FT_FIGURE_9
from famjax.reproduce.ft_table_1 import FT_TABLE_1
from famjax.reproduce.ft_table_3 import FT_TABLE_3
from famjax.reproduce.ft_table_6 import FT_TABLE_6
from famjax.reproduce.ft_v1_figure_7 import FT_V1_FIGURE_7
from famjax.reproduce.ft_v1_table_2 import FT_V1_TABLE_2
from famjax.reproduce.ft_v1_table_6 import FT_V1_TABLE_6
from famjax.reproduce.memory_lanes import MEMORY_LANES
from famjax.reproduce.memory_timescales import MEMORY_TIMESCALES
from famjax.reproduce.memory_writes import MEMORY_WRITES
from famjax.reproduce.t2r_figure_4 import T2R_FIGURE_4
from famjax.reproduce.t2r_figure_5 import T2R_FIGURE_5, T2R_FIGURE_6
from famjax.reproduce.t2r_table_1 import T2R_TABLE_1
from famjax.reproduce.t2r_table_2 import T2R_TABLE_2

EXPERIMENTS: dict[str, Experiment] = {
    experiment.id: experiment
    for experiment in (
        *(
            FAM_FIGURE_3,
            FAM_FIGURE_3_GRADIENT,
            FAM_FIGURE_4,
            FAM_FIGURE_8,
            FAM_FIGURE_10,
            FAM_TABLE_3,
            FAM_TABLE_4,
            FAM_FIGURE_6,
            FAM_FIGURE_7,
            FAM_TABLE_7,
            FAM_TABLE_8,
            FAM_TABLE_9,
            FAM_DIVERSITY,
            FAM_RECONSTRUCTION,
            FAM_RECIPE,
        ),
        *FT_TABLE_1,
        *(FT_TABLE_3, FT_TABLE_6, FT_FIGURE_5, FT_FIGURE_8, FT_FIGURE_9),
        *(FT_FIGURE_4_TRANSLATION, FT_FIGURE_7_TRANSLATION),
        *(FT_V1_TABLE_2, FT_V1_TABLE_6, FT_V1_FIGURE_7),
        *(T2R_TABLE_1, T2R_TABLE_2, T2R_FIGURE_4, T2R_FIGURE_5, T2R_FIGURE_6),
        *(MEMORY_TIMESCALES, MEMORY_LANES, MEMORY_WRITES),
    )
}
