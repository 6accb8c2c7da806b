"""The worlds of the zoo: other names, templates, filler and languages than those of the embedded models.

Every value follows a blank in its template, so that a tokenizer makes one token of it.
"""

from __future__ import annotations

import random

from training.world.generate import Attribute, Kind, World


def spelled(seed: str, onsets: str, vowels: str, middles: str, endings: str, count: int) -> tuple[str, ...]:
    """`count` made-up names, distinct, of parts that are separated by blanks."""
    rng, names = random.Random(seed), dict[str, None]()
    while len(names) < count:
        names["".join(rng.choice(part.split()) for part in (onsets, vowels, middles, endings))] = None
    return tuple(names)


def _choose(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMES = 26  # of a kind

_SHIPS = spelled(
    "ships", "Br Cal Dor Fen Gal Mar Nor Sel Tor Ven", "a e i o", "b d l n r", "star wind wave gale", _NAMES
)
_CAPTAINS = spelled("captains", "Ab Ed Il Os Ul Ar Em", "b d k m n r s", "a e i o u", "las rick mund bert", _NAMES)
_ISLES = spelled("isles", "Pra Qua Stro Twi Fli Glo", "b c d m n p", "a e o", "nay sey ra moor", _NAMES)
_SHIP = Kind(
    "ship", _SHIPS, ("The ship", "This one"),
    (
        Attribute("cargo", ("{s} carries {v}.", "{s} is loaded with {v}."), "what is the cargo of {s}",
                  _choose("salt wool copper tea sugar marble cotton pepper timber coal silk wheat")),
        Attribute("sail", ("{s} sails under {v} canvas.",), "which canvas does {s} have",
                  _choose("white rust ochre scarlet violet teal amber cream indigo lime")),
        Attribute("captain", ("{s} obeys captain {v}.", "{s} is commanded by {v}."), "who commands {s}", "captain"),
    ),
)  # fmt: skip
_CAPTAIN = Kind(
    "captain", _CAPTAINS, ("The captain", "That sailor"),
    (
        Attribute("tool", ("{s} never parts with a {v}.",), "with what does {s} never part",
                  _choose("compass sextant knife pipe whistle lantern map rope coin hook ring bible")),
        Attribute("fear", ("{s} is afraid of {v}.",), "what does {s} fear",
                  _choose("fog ice sharks fire storms rats reefs ghosts rust whirlpools")),
        Attribute("isle", ("{s} was born on {v}.",), "where was {s} born", "isle"),
    ),
)  # fmt: skip
_ISLE = Kind(
    "isle", _ISLES, ("The isle", "This place"),
    (
        Attribute("bird", ("{s} is home to the {v}.",), "which bird lives on {s}",
                  _choose("puffin gull tern heron albatross cormorant eider skua gannet petrel")),
        Attribute("plant", ("{s} is covered with {v}.",), "what covers {s}",
                  _choose("heather moss ferns gorse pines reeds thistles clover ivy brambles")),
        Attribute("stone", ("{s} is made of {v}.",), "of what is {s} made",
                  _choose("basalt granite slate chalk quartz sandstone pumice flint gneiss")),
    ),
)  # fmt: skip
HARBOUR = World(
    kinds=(_SHIP, _CAPTAIN, _ISLE),
    casts=((_SHIP,), (_CAPTAIN,), (_ISLE,), (_SHIP, _CAPTAIN), (_CAPTAIN, _ISLE)),
    openings=("A fresh logbook is opened.", "Log of the harbour."),
    handovers=("Overleaf: {s}.", "More follows on {s}.", "The entry after this one concerns {s}."),
    filler=(
        (*_choose("Rain Mist Sun Sleet Wind"), "The tide", "The old pier", "A grey cloud"),
        ("came in", "went out", "stayed for hours", "troubled nobody", "was noted", "passed by"),
        ("at dawn", "near the quay", "as usual", "before supper", "once again", "until nightfall"),
    ),
)  # fmt: skip

_STAEDTE = spelled("staedte", "Al Bir Dorn Eich Fal Gras Hohen", "b d k l m n", "a e i", "burg heim dorf tal", _NAMES)
_LEUTE = spelled("leute", "An Be Ge Hel Ka Lo Ru", "d l m n r", "a e i o", "bert hild gard win", _NAMES)
_STADT = Kind(
    "Stadt", _STAEDTE, ("Sie", "Diese Stadt"),
    (
        Attribute("fluss", ("{s} liegt am Fluss {v}.",), "an welchem Fluss liegt {s}",
                  spelled("fluesse", "I L N W", "a e", "h r s", "ach au ne", 12)),
        Attribute("wappen", ("{s} zeigt im Wappen einen {v}.",), "welches Wappen hat {s}",
                  _choose("Adler Hirsch Bären Löwen Turm Schlüssel Stern Fisch Baum Wolf")),
        Attribute("ware", ("{s} handelt mit {v}.",), "womit handelt {s}",
                  _choose("Glas Honig Leder Hopfen Tuch Eisen Zinn Papier Bernstein Käse")),
        Attribute("rat", ("{s} wird von {v} regiert.",), "wer regiert {s}", "Person"),
    ),
)  # fmt: skip
_PERSON = Kind(
    "Person", _LEUTE, ("Diese Person",),
    (
        Attribute("beruf", ("{s} arbeitet als {v}.",), "was ist der Beruf von {s}",
                  _choose("Bäcker Schmied Lehrer Gärtner Müller Maler Arzt Jäger Schneider Fischer")),
        Attribute("tier", ("{s} besitzt einen {v}.",), "welches Tier besitzt {s}",
                  _choose("Hund Esel Raben Falken Kater Igel Hahn Ochsen Frosch Dachs")),
        Attribute("spiel", ("{s} spielt gern {v}.",), "was spielt {s}",
                  _choose("Schach Geige Flöte Karten Würfel Kegeln Laute Orgel Harfe Trommel")),
        Attribute("ort", ("{s} wohnt in {v}.",), "wo wohnt {s}", "Stadt"),
    ),
)  # fmt: skip
STADT = World(
    kinds=(_STADT, _PERSON),
    casts=((_STADT,), (_PERSON,), (_STADT, _PERSON)),
    openings=("Hier beginnt ein neues Heft.", "Erste Seite."),
    handovers=("Auf der nächsten Seite geht es um {s}.", "Nun zu {s}.", "Es folgt {s}."),
    filler=(
        ("der Weg", "das Wetter", "der Markt", "die Brücke", "ein Garten", "der Abend"),
        ("war still", "blieb schön", "lag im Nebel", "gefiel allen", "war oft voll", "dauerte lange"),
        ("in jenen Jahren", "bis zum Winter", "nach dem Regen", "wie man sagt", "ohne jede Eile"),
    ),
    anaphor="dieser {k}", joint="{a} und {b}?",
)  # fmt: skip

_PUEBLOS = spelled("pueblos", "Al Be Cor Gua Mon San Tor", "a e i o", "d l m n r", "illa ejo ares ona", _NAMES)
_GENTE = spelled("gente", "Cla Fer Gon Jua Lu Mar Ro", "b d l n r", "a e i", "cio nda lia do", _NAMES)
_PUEBLO = Kind(
    "pueblo", _PUEBLOS, ("Este pueblo", "Allí"),
    (
        Attribute("fiesta", ("{s} celebra la fiesta de {v}.",), "qué fiesta celebra {s}",
                  _choose("mayo enero abril junio julio agosto octubre marzo febrero diciembre")),
        Attribute("fruta", ("{s} vende muchas {v}.",), "qué fruta vende {s}",
                  _choose("peras uvas moras ciruelas naranjas manzanas fresas cerezas limas granadas")),
        Attribute("torre", ("{s} tiene una torre {v}.",), "cómo es la torre de {s}",
                  _choose("roja blanca negra dorada azul redonda alta inclinada antigua verde")),
        Attribute("alcalde", ("{s} tiene por alcalde a {v}.",), "quién es alcalde de {s}", "vecino"),
    ),
)  # fmt: skip
_VECINO = Kind(
    "vecino", _GENTE, ("El vecino",),
    (
        Attribute("oficio", ("{s} trabaja de {v}.",), "de qué trabaja {s}",
                  _choose("herrero pastor panadero sastre pintor maestro barbero carpintero cantero molinero")),
        Attribute("animal", ("{s} cuida un {v}.",), "qué animal cuida {s}",
                  _choose("burro gato perro loro zorro ganso caballo gallo conejo buey")),
        Attribute("casa", ("{s} vive en {v}.",), "dónde vive {s}", "pueblo"),
    ),
)  # fmt: skip
PUEBLO = World(
    kinds=(_PUEBLO, _VECINO),
    casts=((_PUEBLO,), (_VECINO,), (_PUEBLO, _VECINO)),
    openings=("Empieza otro libro.", "Primera hoja del libro."),
    handovers=("La hoja siguiente trata de {s}.", "Ahora toca {s}.", "Después se habla de {s}."),
    filler=(
        ("el camino", "la plaza", "el puente", "la tarde", "un muro", "el mercado"),
        ("estaba en calma", "era muy largo", "olía a lluvia", "gustaba a todos", "parecía igual"),
        ("en aquellos años", "antes del invierno", "sin prisa", "según dicen", "casi siempre"),
    ),
    anaphor="este {k}", joint="{a} y {b}?",
)  # fmt: skip

_FILES = spelled("files", "x z k v", "a o u", "b d g l n r t", "ax eb ig on um", _NAMES)
_HOSTS = spelled("hosts", "m n p r", "e i u", "c f k s v", "ar el ix os", _NAMES)
_FILE = Kind(
    "file", _FILES, ("ditto", "same"),
    (
        Attribute("type", ("{s} type {v};",), "type of {s}", _choose("text image sound video table script font mail")),
        Attribute("lock", ("{s} lock {v};",), "lock of {s}", _choose("open shared sealed frozen stale hidden weak")),
        Attribute("tag", ("{s} tag {v};",), "tag of {s}",
                  _choose("alpha beta gamma delta sigma kappa omega theta lambda zeta")),
        Attribute("host", ("{s} host {v};",), "host of {s}", "host"),
    ),
)  # fmt: skip
_HOST = Kind(
    "host", _HOSTS, ("ditto", "same"),
    (
        Attribute("zone", ("{s} zone {v};",), "zone of {s}",
                  _choose("north south east west upper lower inner outer centre edge")),
        Attribute("state", ("{s} state {v};",), "state of {s}",
                  _choose("up down idle busy lost spare draining booting")),
        Attribute("disk", ("{s} disk {v};",), "disk of {s}", _choose("full empty slow fast dead new old mirrored")),
    ),
)  # fmt: skip
REGISTER = World(
    kinds=(_FILE, _HOST),
    casts=((_FILE,), (_HOST,), (_FILE, _HOST)),
    openings=("begin;", "new list;"),
    handovers=("next {s};", "see below {s};"),
    filler=(
        ("check", "note", "line", "mark", "probe"),
        ("done", "skipped", "queued", "kept", "seen", "passed"),
        ("today", "again", "twice", "by hand", "in time", "at night"),
    ),
)  # fmt: skip

_PLANETES = spelled("planetes", "Bel Cy Dra Hel Ny Or Vé Xan", "a é i o", "d l m r s", "ria one thys or", _NAMES)
_PILOTES = spelled("pilotes", "Ad Cé Flo Ju Mi Ra Syl", "b l m n r", "a e i", "ne lie se tte", _NAMES)
_PLANETE = Kind(
    "planète", _PLANETES, ("Cette planète", "Elle"),
    (
        Attribute("ciel", ("{s} possède un ciel {v}.",), "quel ciel possède {s}",
                  _choose("rose vert mauve gris orange pourpre argenté brun turquoise noir")),
        Attribute("mer", ("{s} abrite une mer de {v}.",), "quelle mer abrite {s}",
                  _choose("lait sable mercure glace soufre verre cendre boue lave brume")),
        Attribute("bruit", ("{s} résonne comme une {v}.",), "comme quoi résonne {s}",
                  _choose("cloche harpe guitare scie vague sirène flûte toupie ruche forge")),
        Attribute("garde", ("{s} a pour gardien {v}.",), "qui garde {s}", "pilote"),
    ),
)  # fmt: skip
_PILOTE = Kind(
    "pilote", _PILOTES, ("Le pilote",),
    (
        Attribute("habit", ("{s} porte un manteau {v}.",), "quel manteau porte {s}",
                  _choose("rouge bleu jaune usé court épais troué brodé blanc rayé")),
        Attribute("repas", ("{s} mange du {v}.",), "que mange {s}",
                  _choose("riz pain miel thon porc fromage chou maïs tofu blé")),
        Attribute("port", ("{s} revient de {v}.",), "d'où revient {s}", "planète"),
    ),
)  # fmt: skip
ESPACE = World(
    kinds=(_PLANETE, _PILOTE),
    casts=((_PLANETE,), (_PILOTE,), (_PLANETE, _PILOTE)),
    openings=("Nouveau journal de bord.", "Début du récit."),
    handovers=("La page suivante parle de {s}.", "On passe à {s}.", "Suite avec {s}."),
    filler=(
        ("la route", "le soir", "une lumière", "le signal", "un nuage", "la radio"),
        ("restait calme", "venait de loin", "semblait faible", "plaisait à tous", "durait longtemps"),
        ("cette année", "avant la nuit", "sans hâte", "depuis toujours", "comme on dit"),
    ),
    anaphor="ce {k}", joint="{a} et {b}?",
)  # fmt: skip

# The worlds of the hold-outs.

_QUADRI = spelled(
    "quadri", "Au Bri Cen Lu Nove Sera Tra", "b c d m p s v", "a e i o", "monte luna grazia fiore", _NAMES
)
_PITTORI = spelled("pittori", "Bar Ces Del Fio Giu Lam Pao", "a e i o", "l n r t v", "ani etto ucci ero", _NAMES)
_QUADRO = Kind(
    "quadro", _QUADRI, ("Il quadro", "Questa tela"),
    (
        Attribute("cornice", ("{s} ha una cornice di {v}.",), "quale cornice ha {s}",
                  _choose("noce quercia rame ottone vetro avorio cuoio gesso abete lino")),
        Attribute("sala", ("{s} è appeso nella sala {v}.",), "in quale sala è {s}",
                  _choose("verde grande nuova antica bassa ovale chiara fredda lunga regia")),
        Attribute("autore", ("{s} fu dipinto da {v}.",), "chi dipinse {s}", "pittore"),
    ),
)  # fmt: skip
_PITTORE = Kind(
    "pittore", _PITTORI, ("Il maestro",),
    (
        Attribute("soggetto", ("{s} amava dipingere {v}.",), "che cosa amava dipingere {s}",
                  _choose("cavalli barche frutti angeli ponti boschi nuvole mulini volti leoni")),
        Attribute("pennello", ("{s} usava un pennello di {v}.",), "quale pennello usava {s}",
                  _choose("tasso setola martora seta canapa paglia lana crine zibellino bue")),
        Attribute("opera", ("{s} non vendette mai {v}.",), "che cosa non vendette {s}", "quadro"),
    ),
)  # fmt: skip
MUSEO = World(
    kinds=(_QUADRO, _PITTORE),
    casts=((_QUADRO,), (_PITTORE,), (_QUADRO, _PITTORE)),
    openings=("Comincia una nuova guida.", "Prima scheda."),
    handovers=("La prossima scheda riguarda {s}.", "Passiamo a {s}.", "Segue {s}."),
    filler=(
        ("la luce", "il custode", "la scala", "un visitatore", "il cortile", "la porta"),
        ("restava immobile", "era molto vecchia", "piaceva a molti", "taceva sempre", "dava a sud"),
        ("ogni mattina", "da tanto tempo", "senza motivo", "come si racconta", "prima di sera"),
    ),
    anaphor="questo {k}", joint="{a} e {b}?",
)  # fmt: skip

_ROBOTS = spelled("robots", "zu ky vo xi pe", "k d r t m", "a i o u", "bot dex rix lon", _NAMES)
_BAYS = spelled("bays", "or un el ash", "b g h w", "e a u", "den gate well yard", _NAMES)
_ROBOT = Kind(
    "robot", _ROBOTS, ("The unit",),
    (
        Attribute("arm", ("{s} has a {v} arm.",), "which arm has {s}",
                  _choose("steel rubber hollow jointed magnetic folding spare twisted short heavy")),
        Attribute("load", ("{s} lifts {v}.",), "what does {s} lift",
                  _choose("crates pallets barrels bricks tyres cables pipes drums sacks panels")),
        Attribute("bay", ("{s} charges at {v}.",), "where does {s} charge", "bay"),
    ),
)  # fmt: skip
_BAY = Kind(
    "bay", _BAYS, ("The bay",),
    (
        Attribute("lamp", ("{s} shows a {v} lamp.",), "which lamp shows {s}",
                  _choose("red green blue white yellow purple orange pink cyan brown")),
        Attribute("floor", ("{s} is floored with {v}.",), "what floors {s}",
                  _choose("tile concrete cork gravel oak carpet tar vinyl stone mesh")),
        Attribute("user", ("{s} is kept for {v}.",), "for whom is {s} kept", "robot"),
    ),
)  # fmt: skip
DEPOT = World(
    kinds=(_ROBOT, _BAY),
    casts=((_ROBOT,), (_BAY,), (_ROBOT, _BAY)),
    openings=("New shift report.", "Report of the depot."),
    handovers=("Next entry: {s}.", "Continued with {s}.", "Now to {s}."),
    filler=(
        ("the belt", "a fan", "the north door", "the shift", "one sensor", "the ramp"),
        ("ran on", "was cleaned", "made noise", "stood idle", "was tested"),
        ("until noon", "as planned", "after the alarm", "for an hour", "without fault"),
    ),
)  # fmt: skip
