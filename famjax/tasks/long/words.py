"""Adjectives and nouns, whose pairs are the words of keys and lists, as in RULER."""

from __future__ import annotations

_ADJECTIVES = """
able ample ancient arctic autumn bitter blank bold brave brief bright brisk broad calm careful
cheap clean clear clever cold cool coral crisp curly damp dark dear deep dense distant dry dull
eager early eastern easy empty equal exact faint fair famous fast fine firm flat fresh full
gentle glad golden grand green happy harsh heavy hollow honest humble icy idle inner ivory jolly
keen kind large late lazy level light little local lonely long loud loyal lucky lunar mellow
mild modern narrow neat noble northern odd old open outer pale patient plain polite proud pure
quick quiet rapid rare ready rich ripe rough round royal rural rusty sandy scarlet secret sharp
short silent silver simple slim slow small smooth soft solar solid southern spare steady steep
stern still stony stormy strict strong sturdy sunny sweet swift tall tame tender thick thin tidy
tiny tough upper urban usual vast violet vivid warm weak western wide wild wise wooden young
"""
_NOUNS = """
acorn anchor apple arrow badge bakery balcony barrel basket beacon beaver bell bench bicycle
blanket blossom bottle branch bridge bucket button cabin cactus camel candle canyon carpet
castle cellar chapel cherry chimney circle cliff clock cloud coast collar comet compass copper
corner cottage cotton cradle crystal curtain dagger daisy desert diamond dolphin drawer eagle
ember engine falcon farmer feather fence ferry field finger flag flute forest fountain garden
garlic gate ginger glacier globe glove goose grape guitar hammer harbor helmet hill honey horse
island jacket jungle kettle kitchen ladder lagoon lantern leaf lemon letter library lizard
lobster magnet maple market meadow medal melon mirror monkey mountain museum mustard napkin
needle nest oasis ocean olive onion orchard otter oven oyster paddle palace panther paper parrot
pebble pencil pepper piano pigeon pillow planet pocket pond potato prairie pumpkin rabbit raven
ribbon river robin rocket saddle salmon scarf school shadow shovel signal spoon squirrel station
statue stream summit sword table temple thunder ticket tiger tower tractor tunnel turtle
umbrella valley velvet village violin wagon walnut whale window winter yard zebra
"""

ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())
