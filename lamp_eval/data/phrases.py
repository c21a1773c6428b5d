"""What the synthetic users' texts are made of; all of it written for this purpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Phrases:
    """The parts of one task's items.

    Attributes:
        cues: by kind (a label, a score, a topic, a way to write) what hints at it in a text.
        frames: texts that take two cues as `{}`, and `{subject}`.
        n_favourites: how many kinds a user prefers; None: every second one, so that all kinds are
            as frequent in the texts of each user, and only choices are personal.
        answers: by kind the answers that say so, with the `{subject}`, or `{Subject}` in title
            case; none: the kind itself is the answer.
        subjects: what a text is about besides its two kinds.
        may_repeat: whether a user may have the same text twice.
    """

    cues: Mapping[str, tuple[str, ...]]
    frames: tuple[str, ...]
    n_favourites: int | None = None
    answers: Mapping[str, tuple[str, ...]] | None = None
    subjects: tuple[str, ...] = ()
    may_repeat: bool = False


MOVIES = Phrases(
    cues={
        "sci-fi": ("a spaceship crew stranded light years from home", "an android that learns to dream"),
        "based on a book": ("a faithful adaptation of a bestselling novel", "a story first told in a novel"),
        "comedy": ("a string of hilarious mishaps", "laugh-out-loud jokes at every turn"),
        "action": ("car chases and gunfights", "an explosive rescue mission"),
        "twist ending": ("a final reveal that nobody sees coming", "a last scene that turns everything around"),
        "dystopia": ("a totalitarian future state that watches everyone", "survivors in a ruined future city"),
        "dark comedy": ("jokes told at a funeral", "a hilariously bungled murder"),
        "classic": ("a beloved black-and-white picture from the 1940s", "one of the oldest masterpieces of cinema"),
        "psychology": ("a therapist who questions her own mind", "a man losing his grip on his sanity"),
        "fantasy": ("dragons and a young wizard", "a magical kingdom under a spell"),
        "romance": ("two strangers who fall in love", "a love letter that arrives years late"),
        "thought-provoking": ("hard questions about what it means to be human", "ideas that linger for days"),
        "social commentary": ("a sharp look at class and inequality", "a critique of modern society"),
        "violence": ("brutal and bloody fights", "a gruesome killing spree"),
        "true story": ("real events that happened in 1972", "the actual life of a forgotten hero"),
    },
    n_favourites=4,
    frames=(
        "This film has {} and {}.",
        "Expect {}, along with {}.",
        "The plot brings together {} and {}.",
        "It offers {}, and also {}.",
        "A picture with {} as well as {}.",
    ),
    may_repeat=True,  # these users stay as they were first measured
)  # fmt: skip

NEWS = Phrases(
    cues={
        "food & drink": ("a recipe for lemon cake", "the best coffee in town"),
        "sports": ("a goal in the last minute of the match", "a coach and her team before the final"),
        "education": ("teachers in crowded classrooms", "a new exam for pupils"),
        "religion": ("a sermon on forgiveness", "pilgrims on their way to a shrine"),
        "travel": ("a hotel on a quiet beach", "cheap flights to the islands"),
        "crime": ("a burglary in broad daylight", "a murder suspect under arrest"),
        "science & technology": ("a telescope that finds new planets", "a robot with better software"),
        "politics": ("a senator who changed parties", "a close vote in parliament"),
        "style & beauty": ("the boldest dresses of the season", "a lipstick that lasts all day"),
        "healthy living": ("yoga for better sleep", "a daily walk against stress"),
    },
    frames=(
        "Today in {subject}: {}, and {}.",
        "A story from {subject} about {} and {}.",
        "Seen and heard in {subject}: {}, then {}.",
        "Our reporter in {subject} writes about {}, but also {}.",
    ),
    subjects=(
        "Lisbon", "Chicago", "Nairobi", "Oslo", "Lima", "Seoul", "Dublin", "Cairo", "Toronto",
        "Prague", "Mumbai", "Denver", "Athens", "Quito", "Perth", "Vienna",
    ),
)  # fmt: skip

QUALITIES = (
    "tiny", "vintage", "electric", "wooden", "homemade", "portable", "folding", "colorful",
    "waterproof", "Italian", "rusty", "inflatable", "silent", "handmade", "magnetic", "striped",
)  # fmt: skip
THINGS = (
    "kettle", "bike", "lamp", "tent", "chair", "guitar", "umbrella", "toaster", "boat", "clock",
    "drum", "puppet", "mirror", "camera", "ladder", "pillow",
)  # fmt: skip

REVIEWS = Phrases(
    cues={
        "5": ("it is excellent", "it is simply perfect"),
        "4": ("it is good", "it is quite nice"),
        "2": ("it is poor", "it is rather weak"),
        "1": ("it is terrible", "it is truly awful"),
    },
    frames=(
        "About the {subject}: {}, and yet {}.",
        "The {subject}: at times {}, at times {}.",
        "My {subject}: on some days {}, on others {}.",
        "With this {subject} I am torn: {}, but then {}.",
    ),
    subjects=tuple(f"{quality} {thing}" for quality in QUALITIES for thing in THINGS),
)  # fmt: skip

HEADLINES = Phrases(
    cues={
        "cost": ("The cost has doubled.", "Many families worry about the cost."),
        "danger": ("Doctors see a danger.", "The danger is often overlooked."),
        "history": ("It has a long history.", "Old letters tell its history."),
        "beginners": ("Beginners can start today.", "It is easy for beginners."),
        "dispute": ("There is a dispute among neighbours.", "The dispute went to court."),
        "future": ("The future looks bright.", "Experts look into the future."),
        "mistakes": ("Most people make mistakes.", "The same mistakes are made again."),
        "science": ("Science has an answer.", "This year science took a closer look."),
    },
    frames=(
        "This is about {subject}. {} {}",
        "Everyone is talking about {subject}. {} {}",
        "Readers asked us about {subject}. {} {}",
        "Our topic today is {subject}. {} {}",
    ),
    answers={
        "cost": ("Cost Check For {Subject}",),
        "danger": ("Danger Alert: {Subject}",),
        "history": ("History Lesson: {Subject}",),
        "beginners": ("Beginners Guide To {Subject}",),
        "dispute": ("Dispute Over {Subject}",),
        "future": ("Future Trends: {Subject}",),
        "mistakes": ("Mistakes Everyone Makes With {Subject}",),
        "science": ("Science Explains {Subject}",),
    },
    subjects=tuple(f"{quality} {thing}s" for quality in QUALITIES for thing in THINGS),
)  # fmt: skip

TOPICS = (
    "graph coloring", "speech recognition", "query optimization", "robot navigation",
    "spam filtering", "protein folding", "face detection", "music retrieval",
)  # fmt: skip

METHODS = (
    "adaptive", "parallel", "statistical", "online", "neural", "symbolic", "distributed",
    "approximate", "incremental", "visual", "probabilistic", "hybrid", "mobile", "automatic",
    "hierarchical", "quantum", "robust", "secure", "scalable", "interactive",
)  # fmt: skip

ABSTRACTS = Phrases(
    cues={
        "survey": ("We conduct a survey.", "A survey of the literature is given."),
        "theory": ("We develop a theory.", "A new theory is proved."),
        "benchmark": ("We provide a benchmark.", "Ten systems meet in a benchmark."),
        "speed": ("We improve the speed.", "The speed is doubled."),
        "replication": ("We attempt a replication.", "A replication of old work fails."),
        "privacy": ("We protect privacy.", "The privacy of users is kept."),
        "noise": ("We add noise.", "The effect of noise is measured."),
        "fusion": ("We try a fusion of models.", "The fusion of methods works best."),
    },
    frames=(
        "We study {subject}. {} {}",
        "This paper is about {subject}. {} {}",
        "Our subject is {subject}. {} {}",
        "Much is known about {subject}. {} {}",
    ),
    answers={
        "survey": ("Survey of Recent {Subject}",),
        "theory": ("Theory of {Subject}",),
        "benchmark": ("Benchmark Results for {Subject}",),
        "speed": ("Speed Limits in {Subject}",),
        "replication": ("Replication Study: {Subject}",),
        "privacy": ("Privacy-Preserving {Subject}",),
        "noise": ("Noise and {Subject}",),
        "fusion": ("Fusion Models for {Subject}",),
    },
    subjects=tuple(f"{method} {topic}" for method in METHODS for topic in TOPICS),
)  # fmt: skip

BELONGINGS = (
    *THINGS,
    "radio", "piano", "oven", "fridge", "shovel", "tractor", "scooter", "hammer", "candle",
    "blanket", "teapot", "carpet", "curtain", "basket", "bucket", "broom", "sofa", "violin",
    "trumpet", "bottle", "wallet", "jacket", "scarf", "necklace", "laptop", "printer",
    "fountain", "statue", "garage", "balcony", "garden", "chimney", "window", "cupboard",
    "trampoline", "hammock", "compass", "telescope", "keyboard", "suitcase", "calendar",
    "puzzle", "sandwich", "pumpkin",
)  # fmt: skip

# A record is the tweet alone, without the text it came from: its own words must tell the habit. So
# there are few moods, and little else in a tweet that nobody can foresee.
TWEETS = Phrases(
    cues={
        "annoyed": ("annoyed", "really annoyed"),
        "amused": ("amused", "really amused"),
        "sad": ("sad", "really sad"),
        "proud": ("proud", "really proud"),
    },
    frames=(
        "The {subject} makes me {} and also {}.",
        "About the {subject} I am {}, but {} as well.",
        "I look at the {subject}. I feel {} and {}.",
        "I am {} and {} because of the {subject}.",
    ),
    answers={
        "annoyed": ("annoyed, not again! {subject}",),
        "amused": ("amused, too funny! {subject}",),
        "sad": ("sad, poor me! {subject}",),
        "proud": ("proud, well done! {subject}",),
    },
    subjects=BELONGINGS,
)

PAPERS = Phrases(
    cues={topic: (topic.title(),) for topic in TOPICS},
    frames=(
        "{} and {} for {subject}",
        "How {subject} Use {} and {}",
        "From {} to {}: A View from {subject}",
        "{} Meets {} in {subject}",
    ),
    answers={
        topic: tuple(
            form.format(topic.title())
            for form in ("{}: A Primer", "Advances in {}", "{} and Its Methods")
        )
        for topic in TOPICS
    },
    subjects=tuple(
        f"{which} {place}"
        for which in ("Rural", "Public", "Busy", "Small", "Modern", "Private", "Old", "Island")
        for place in (
            "Hospitals", "Schools", "Airports", "Farms", "Museums", "Banks", "Factories",
            "Harbors", "Theaters", "Courts", "Hotels", "Kitchens",
        )
    ),
)  # fmt: skip

PHRASES: dict[str, Phrases] = {
    "citation": PAPERS,
    "movie_tagging": MOVIES,
    "news_categorize": NEWS,
    "product_rating": REVIEWS,
    "news_headline": HEADLINES,
    "scholarly_title": ABSTRACTS,
    "tweet_paraphrase": TWEETS,
}
