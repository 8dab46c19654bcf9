//! Which tensors come after one, by their names.
//!
//! In: the tensors of a virtual file, and each that a reader comes to. Out: those to fetch ahead and how much of each,
//! because readers went on so from tensors of such names before. A pure state machine, like `readahead`.
//!
//! Loaders take the tensors of every layer in one order: that of names, of the model's modules, or one of their own.
//! Where they lie is another matter. So a step from one tensor to the next is noted as what changed in the name: which
//! text came, and by how much each number in it rose. From the second layer on the next one is known.
//!
//! A wrong guess costs little: nothing is fetched before one was right, the window starts small and doubles with each
//! that is, and one that is not ends it.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;

/// The first window.
const FIRST_WINDOW_BYTES: u64 = 8 << 20;

/// Steps that are known from tensors of one pattern: within a layer, from one expert to the next, to the next layer.
const MAX_STEPS_PER_PATTERN: usize = 4;

/// How often a step is seen before what was seen before it counts half.
const HALVING_SEEN_COUNT: u32 = 8;

/// Patterns of names that steps are known of. A model has some dozens.
const MAX_PATTERN_COUNT: usize = 1 << 8;

/// A longer name, or one with more numbers, is not taken apart: files may have names of megabytes.
const MAX_NAME_BYTES: usize = 256;
const MAX_NUMBERS: usize = 16;

/// Tensors that are foreseen at once.
const MAX_PREDICTIONS: usize = 64;

/// A number with more digits than this is text.
const MAX_DIGITS: usize = 9;

/// What is known of an open virtual file. Of each tensor it keeps a number of 8 bytes and its place.
#[derive(Debug, Default)]
pub struct TensorPredictor {
    /// The places of tensors by the hash of their names: to take one for another costs a wrong guess.
    indices: HashMap<u64, u32>,
    steps: HashMap<String, Vec<SeenStep>>,
    last: Option<NamePattern>,
    /// What comes next, by what is known so far.
    predictions: VecDeque<Prediction>,
    window: u64,
}

/// The text of a name, with `#` for each number.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NamePattern {
    pattern: String,
    numbers: Vec<u32>,
}

/// How one name comes from another.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NameStep {
    pattern: String,
    numbers: Vec<NumberStep>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum NumberStep {
    /// So much more than the number that stands there in the other name.
    Add(i64),
    /// The other has none there.
    Set(u32),
}

/// A step that was seen, and how often, less for what is long ago.
#[derive(Debug)]
struct SeenStep {
    step: NameStep,
    seen_count: u32,
}

#[derive(Debug)]
struct Prediction {
    index: u32,
    name: NamePattern,
    /// What is fetched of it.
    bytes: u64,
}

impl TensorPredictor {
    /// Of tensors with these places and names.
    pub fn new<'a>(tensors: impl Iterator<Item = (u32, &'a str)>) -> TensorPredictor {
        let mut course = TensorPredictor::default();
        for (place, name) in tensors.filter(|(_, name)| name.len() <= MAX_NAME_BYTES) {
            course.indices.insert(course.hash(name), place);
        }
        course
    }

    /// A reader comes to a tensor; which ones to fetch now, and how many bytes of each, the next first. `left` says how
    /// much of one may still be wanted, and `widest` are the bytes that may be fetched ahead at once.
    pub fn on_tensor(
        &mut self,
        place: u32,
        name: &str,
        widest: u64,
        left: impl Fn(u32) -> u64,
    ) -> Vec<(u32, u64)> {
        let Some(name) = NamePattern::parse(name) else {
            self.last = None;
            return Vec::new();
        };
        if self.last.as_ref() == Some(&name) {
            return Vec::new();
        }
        let is_expected = self.predictions.iter().position(|foreseen| foreseen.index == place);
        match is_expected {
            Some(n) => {
                self.predictions.drain(..=n);
                self.window = (self.window * 2).max(FIRST_WINDOW_BYTES).min(widest);
            }
            None => {
                self.predictions.clear();
                self.window = 0;
            }
        }
        if let Some(last) = self.last.replace(name.clone()) {
            self.learn(last, &name);
        }
        self.extend_predictions(place, name, left)
    }

    /// Adds to what is expected while there is room, and one at the least: it may turn out to be right.
    fn extend_predictions(
        &mut self,
        place: u32,
        name: NamePattern,
        left: impl Fn(u32) -> u64,
    ) -> Vec<(u32, u64)> {
        let mut fetch = Vec::new();
        let mut bytes: u64 = self.predictions.iter().map(|foreseen| foreseen.bytes).sum();
        while self.predictions.len() < MAX_PREDICTIONS
            && (bytes < self.window || self.predictions.is_empty())
        {
            let from = self.predictions.back().map_or(&name, |foreseen| &foreseen.name);
            let Some((next, name)) = self.next_tensor(from) else { break };
            if next == place || self.predictions.iter().any(|foreseen| foreseen.index == next) {
                break;
            }
            let left = left(next).min(self.window - bytes.min(self.window));
            if left > 0 {
                fetch.push((next, left));
            }
            bytes += left;
            self.predictions.push_back(Prediction { index: next, name, bytes: left });
        }
        fetch
    }

    fn hash(&self, name: &str) -> u64 {
        self.indices.hasher().hash_one(name)
    }

    fn learn(&mut self, from: NamePattern, to: &NamePattern) {
        let is_known = self.steps.contains_key(&from.pattern);
        if !is_known && self.steps.len() >= MAX_PATTERN_COUNT {
            return;
        }
        let step = NameStep::between(&from, to);
        let steps = self.steps.entry(from.pattern).or_default();
        match steps.iter_mut().find(|known| known.step == step) {
            Some(known) => known.seen_count += 1,
            None => {
                steps.truncate(MAX_STEPS_PER_PATTERN - 1);
                steps.push(SeenStep { step, seen_count: 1 });
            }
        }
        if steps.iter().any(|known| known.seen_count > HALVING_SEEN_COUNT) {
            steps.iter_mut().for_each(|known| known.seen_count = known.seen_count.div_ceil(2));
        }
        steps.sort_by_key(|known| Reverse(known.seen_count));
    }

    /// Where the most usual step leads to that leads to a tensor.
    fn next_tensor(&self, from: &NamePattern) -> Option<(u32, NamePattern)> {
        let mut steps = self.steps.get(&from.pattern)?.iter();
        steps.find_map(|SeenStep { step, .. }| {
            let name = step.apply(from)?;
            let place = self.indices.get(&self.hash(&name.text()))?;
            Some((*place, name))
        })
    }
}

impl NamePattern {
    fn parse(name: &str) -> Option<NamePattern> {
        if name.len() > MAX_NAME_BYTES {
            return None;
        }
        let (mut pattern, mut numbers, mut rest) = (String::new(), Vec::new(), name);
        while !rest.is_empty() {
            let is_digit = rest.starts_with(|c: char| c.is_ascii_digit());
            let end = rest.find(|c: char| c.is_ascii_digit() != is_digit).unwrap_or(rest.len());
            let (part, after) = rest.split_at(end);
            let is_number =
                is_digit && part.len() <= MAX_DIGITS && (part == "0" || !part.starts_with('0'));
            match part.parse().ok().filter(|_| is_number) {
                Some(number) => {
                    numbers.push(number);
                    pattern.push('#');
                }
                None => pattern.push_str(part),
            }
            rest = after;
        }
        (numbers.len() <= MAX_NUMBERS).then_some(NamePattern { pattern, numbers })
    }

    fn text(&self) -> String {
        let mut numbers = self.numbers.iter();
        let mut text = String::new();
        for part in self.pattern.split_inclusive('#') {
            match (part.strip_suffix('#'), numbers.as_slice()) {
                (Some(before), [number, ..]) => {
                    numbers.next();
                    text.push_str(before);
                    text.push_str(&number.to_string());
                }
                _ => text.push_str(part),
            }
        }
        text
    }
}

impl NameStep {
    fn between(from: &NamePattern, to: &NamePattern) -> NameStep {
        let before = from.numbers.iter().map(Some).chain(std::iter::repeat(None));
        let number = |(&number, before): (&u32, Option<&u32>)| match before {
            Some(&before) => NumberStep::Add(i64::from(number) - i64::from(before)),
            None => NumberStep::Set(number),
        };
        let numbers = to.numbers.iter().zip(before).map(number).collect();
        NameStep { pattern: to.pattern.clone(), numbers }
    }

    /// The name that it leads to; `None` if there can be none.
    fn apply(&self, from: &NamePattern) -> Option<NamePattern> {
        let numbers = self.numbers.iter().enumerate().map(|(n, number)| match number {
            NumberStep::Add(more) => u32::try_from(i64::from(*from.numbers.get(n)?) + more).ok(),
            NumberStep::Set(number) => Some(*number),
        });
        Some(NamePattern {
            pattern: self.pattern.clone(),
            numbers: numbers.collect::<Option<_>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const WIDEST: u64 = 32 * MIB;

    /// Layers of these tensors, as their names are sorted.
    fn model(layers: u32, of: &[&str]) -> Vec<String> {
        let name = |n: u32, part: &&str| format!("model.layers.{n}.{part}.weight");
        let mut names: Vec<_> =
            (0..layers).flat_map(|n| of.iter().map(move |part| name(n, part))).collect();
        names.sort();
        names
    }

    /// Goes to these in turn, each of 10 MiB; which were not fetched before they came, and how many in vain.
    fn go<'a>(names: &[String], to: impl IntoIterator<Item = &'a String>) -> (Vec<&'a str>, usize) {
        let mut course = TensorPredictor::new((0..).zip(names.iter().map(String::as_str)));
        let (mut fetched, mut missed) = (vec![false; names.len()], Vec::new());
        for name in to {
            let place = names.iter().position(|known| known == name).unwrap();
            if !std::mem::take(&mut fetched[place]) {
                missed.push(name.as_str());
            }
            for (next, bytes) in course.on_tensor(place as u32, name, WIDEST, |_| 10 * MIB) {
                assert!((1..=10 * MIB).contains(&bytes));
                fetched[next as usize] = true;
            }
            let ahead: u64 = course.predictions.iter().map(|foreseen| foreseen.bytes).sum();
            assert!(ahead <= WIDEST);
        }
        (missed, fetched.iter().filter(|fetched| **fetched).count())
    }

    #[test]
    fn from_the_second_layer_on_what_comes_is_known_whatever_the_order_within_a_layer() {
        let parts = ["attn.q", "attn.o", "mlp.gate", "mlp.up", "mlp.down"];
        let names = model(30, &parts);
        let order: Vec<_> = (0..30)
            .flat_map(|n| parts.iter().map(move |part| format!("model.layers.{n}.{part}.weight")))
            .collect();
        let (missed, in_vain) = go(&names, &order);
        // One layer to learn, and the step to the next; one that is right, and then all.
        assert_eq!(missed, order[..7].iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(in_vain, 0);
    }

    #[test]
    fn experts_and_the_layers_that_they_are_in_are_told_apart() {
        let experts: Vec<_> =
            (0..8).flat_map(|n| ["up", "down"].map(|part| format!("experts.{n}.{part}"))).collect();
        let parts: Vec<_> =
            ["attn"].into_iter().chain(experts.iter().map(String::as_str)).collect();
        let names = model(6, &parts);
        let order: Vec<_> = (0..6)
            .flat_map(|n| parts.iter().map(move |part| format!("model.layers.{n}.{part}.weight")))
            .collect();
        let (missed, in_vain) = go(&names, &order);
        assert!(
            missed.len() < 20 && missed.iter().all(|name| name < &"model.layers.2"),
            "{missed:?}"
        );
        assert!(in_vain < 4, "{in_vain}");
    }

    #[test]
    fn an_order_that_is_none_fetches_next_to_nothing() {
        let names = model(40, &["a", "b", "c"]);
        let mut shuffled: Vec<_> = names.iter().collect();
        shuffled.sort_by_key(|name| {
            name.bytes().fold(7u32, |sum, byte| {
                (sum ^ u32::from(byte)).wrapping_mul(16_777_619).rotate_left(9)
            })
        });
        let (missed, in_vain) = go(&names, shuffled);
        assert!(missed.len() > 110 && in_vain < 10, "{} {in_vain}", missed.len());
    }

    #[test]
    fn what_was_given_takes_no_room_in_the_window() {
        let names = model(9, &["a"]);
        let mut course = TensorPredictor::new((0..).zip(names.iter().map(String::as_str)));
        let mut come =
            |place: u32| {
                course.on_tensor(place, &names[place as usize], WIDEST, |next| {
                    if next == 8 { MIB } else { 0 }
                })
            };
        assert!((0..2).all(|place| come(place).is_empty()));
        assert_eq!(come(2), [(8, MIB)]);
    }

    #[test]
    fn names_are_what_they_were() {
        for name in ["", "a", "0", "a.10.b.2", "a.007", "1234567890123", "ä.1", "#", "a#1#"] {
            let taken = NamePattern::parse(name).unwrap();
            assert!(taken.text() == name || name.contains('#'), "{name}");
        }
        let of = |name| NamePattern::parse(name).unwrap();
        let step = NameStep::between(&of("a.3.b"), &of("c.2.1"));
        assert_eq!(step.apply(&of("a.5.b")), Some(of("c.4.1")));
        assert_eq!(step.apply(&of("a.0.b")), None);
        assert_eq!(step.apply(&of("a.b")), None);
    }

    #[test]
    fn memory_is_bounded() {
        let mut course = TensorPredictor::default();
        for n in 0..3 * MAX_PATTERN_COUNT as u32 {
            let letters: String = n.to_string().chars().map(|c| (c as u8 + 49) as char).collect();
            course.on_tensor(n, &letters, WIDEST, |_| MIB);
            course.on_tensor(n, &format!("x.{}", n * n % 7919), WIDEST, |_| MIB);
            course.on_tensor(n, &"x.".repeat(MAX_NAME_BYTES), WIDEST, |_| MIB);
            course.on_tensor(n, &"1.".repeat(MAX_NUMBERS + 1), WIDEST, |_| MIB);
        }
        assert!(course.steps.keys().all(|pattern| pattern.len() <= MAX_NAME_BYTES));
        assert!(
            course.steps.len() <= MAX_PATTERN_COUNT
                && course.steps.values().all(|steps| steps.len() <= MAX_STEPS_PER_PATTERN)
        );
    }
}
