//! Predicts the tensors that are read after one, by their names.
//!
//! In: the tensors of a virtual file, and each that a reader enters. Out: the tensors to fetch ahead, and how much of
//! each. A pure state machine.
//!
//! Loaders take the tensors of every layer in one order: that of names, of the model's modules, or one of their own.
//! Where the tensors lie is another matter. So a step from one tensor to the next is learned by names: which text came,
//! and by how much each number rose. From the second layer on the next tensor is known.
//!
//! A wrong prediction costs little. Nothing is fetched before one was right. The window starts small, doubles with each
//! right one, and closes with a wrong one.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;

/// The first window.
const FIRST_WINDOW_BYTES: u64 = 8 << 20;

/// Steps kept for names of one pattern: within a layer, from one expert to the next, to the next layer.
const MAX_STEPS_PER_PATTERN: usize = 4;

/// How often a step is seen before all counts of its pattern are halved, so that older steps count less.
const HALVING_SEEN_COUNT: u32 = 8;

/// Patterns of names whose steps are kept. A model has some dozens.
const MAX_PATTERN_COUNT: usize = 1 << 8;

/// A longer name, or one with more numbers, is not parsed: files may have names of megabytes.
const MAX_NAME_BYTES: usize = 256;
const MAX_NUMBERS: usize = 16;

/// Tensors predicted at once.
const MAX_PREDICTIONS: usize = 64;

/// A number with more digits than this is text.
const MAX_DIGITS: usize = 9;

/// The order of tensors in one open file, as far as it is learned. Of each tensor it keeps a hash and an index.
#[derive(Debug, Default)]
pub struct TensorPredictor {
    /// The indices of tensors by the hash of their names: a collision costs a wrong prediction.
    indices: HashMap<u64, u32>,
    steps: HashMap<String, Vec<SeenStep>>,
    last: Option<NamePattern>,
    /// The tensors expected next, in order.
    predictions: VecDeque<Prediction>,
    window: u64,
}

/// The text of a name, with `#` for each number.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NamePattern {
    pattern: String,
    numbers: Vec<u32>,
}

/// How one name follows from another.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NameStep {
    pattern: String,
    numbers: Vec<NumberStep>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum NumberStep {
    /// So much more than the number at this place in the other name.
    Add(i64),
    /// The other name has no number at this place.
    Set(u32),
}

/// A step and how often it was seen, where older counts weigh less.
#[derive(Debug)]
struct SeenStep {
    step: NameStep,
    seen_count: u32,
}

#[derive(Debug)]
struct Prediction {
    index: u32,
    name: NamePattern,
    /// How much of it is fetched.
    bytes: u64,
}

impl TensorPredictor {
    /// Takes the indices and names of the tensors to predict.
    pub fn new<'a>(tensors: impl Iterator<Item = (u32, &'a str)>) -> TensorPredictor {
        let mut predictor = TensorPredictor::default();
        for (index, name) in tensors.filter(|(_, name)| name.len() <= MAX_NAME_BYTES) {
            predictor.indices.insert(predictor.hash(name), index);
        }
        predictor
    }

    /// Learns from a reader that enters a tensor. Returns the tensors to fetch now and how many bytes of each, the next
    /// first. `undelivered` gives the bytes of a tensor that may still be read, and `max_window` bounds the bytes
    /// fetched ahead at once.
    pub fn on_tensor(
        &mut self,
        index: u32,
        name: &str,
        max_window: u64,
        undelivered: impl Fn(u32) -> u64,
    ) -> Vec<(u32, u64)> {
        let Some(name) = NamePattern::parse(name) else {
            self.last = None;
            return Vec::new();
        };
        if self.last.as_ref() == Some(&name) {
            return Vec::new();
        }
        let predicted = self.predictions.iter().position(|prediction| prediction.index == index);
        match predicted {
            Some(n) => {
                self.predictions.drain(..=n);
                self.window = (self.window * 2).max(FIRST_WINDOW_BYTES).min(max_window);
            }
            None => {
                self.predictions.clear();
                self.window = 0;
            }
        }
        if let Some(last) = self.last.replace(name.clone()) {
            self.learn(last, &name);
        }
        self.extend_predictions(index, name, undelivered)
    }

    /// Adds predictions while the window has room, and at least one: it may turn out to be right.
    fn extend_predictions(
        &mut self,
        index: u32,
        name: NamePattern,
        undelivered: impl Fn(u32) -> u64,
    ) -> Vec<(u32, u64)> {
        let mut fetch = Vec::new();
        let mut bytes: u64 = self.predictions.iter().map(|prediction| prediction.bytes).sum();
        while self.predictions.len() < MAX_PREDICTIONS
            && (bytes < self.window || self.predictions.is_empty())
        {
            let from = self.predictions.back().map_or(&name, |prediction| &prediction.name);
            let Some((next, name)) = self.next_tensor(from) else { break };
            if next == index || self.predictions.iter().any(|prediction| prediction.index == next) {
                break;
            }
            let undelivered = undelivered(next).min(self.window - bytes.min(self.window));
            if undelivered > 0 {
                fetch.push((next, undelivered));
            }
            bytes += undelivered;
            self.predictions.push_back(Prediction { index: next, name, bytes: undelivered });
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
        match steps.iter_mut().find(|seen| seen.step == step) {
            Some(seen) => seen.seen_count += 1,
            None => {
                steps.truncate(MAX_STEPS_PER_PATTERN - 1);
                steps.push(SeenStep { step, seen_count: 1 });
            }
        }
        if steps.iter().any(|seen| seen.seen_count > HALVING_SEEN_COUNT) {
            steps.iter_mut().for_each(|seen| seen.seen_count = seen.seen_count.div_ceil(2));
        }
        steps.sort_by_key(|seen| Reverse(seen.seen_count));
    }

    /// The tensor that the most frequent step leads to, of the steps that lead to one.
    fn next_tensor(&self, from: &NamePattern) -> Option<(u32, NamePattern)> {
        let mut steps = self.steps.get(&from.pattern)?.iter();
        steps.find_map(|SeenStep { step, .. }| {
            let name = step.apply(from)?;
            let index = self.indices.get(&self.hash(&name.text()))?;
            Some((*index, name))
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

    /// The name that it leads to; `None` if there is none.
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
    const MAX_WINDOW_BYTES: u64 = 32 * MIB;

    /// Layers of these tensors, as their names are sorted.
    fn model(layers: u32, of: &[&str]) -> Vec<String> {
        let name = |n: u32, part: &&str| format!("model.layers.{n}.{part}.weight");
        let mut names: Vec<_> =
            (0..layers).flat_map(|n| of.iter().map(move |part| name(n, part))).collect();
        names.sort();
        names
    }

    /// Enters these tensors of 10 MiB in turn. Returns those that were not fetched before, and how many were fetched in
    /// vain.
    fn go<'a>(names: &[String], to: impl IntoIterator<Item = &'a String>) -> (Vec<&'a str>, usize) {
        let mut predictor = TensorPredictor::new((0..).zip(names.iter().map(String::as_str)));
        let (mut fetched, mut missed) = (vec![false; names.len()], Vec::new());
        for name in to {
            let index = names.iter().position(|known| known == name).unwrap();
            if !std::mem::take(&mut fetched[index]) {
                missed.push(name.as_str());
            }
            for (next, bytes) in
                predictor.on_tensor(index as u32, name, MAX_WINDOW_BYTES, |_| 10 * MIB)
            {
                assert!((1..=10 * MIB).contains(&bytes));
                fetched[next as usize] = true;
            }
            let ahead: u64 = predictor.predictions.iter().map(|prediction| prediction.bytes).sum();
            assert!(ahead <= MAX_WINDOW_BYTES);
        }
        (missed, fetched.iter().filter(|fetched| **fetched).count())
    }

    #[test]
    fn from_the_second_layer_on_any_order_within_a_layer_is_predicted() {
        let parts = ["attn.q", "attn.o", "mlp.gate", "mlp.up", "mlp.down"];
        let names = model(30, &parts);
        let order: Vec<_> = (0..30)
            .flat_map(|n| parts.iter().map(move |part| format!("model.layers.{n}.{part}.weight")))
            .collect();
        let (missed, in_vain) = go(&names, &order);
        // One layer to learn, the step to the next one, the first right prediction, and then all.
        assert_eq!(missed, order[..7].iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(in_vain, 0);
    }

    #[test]
    fn experts_and_their_layers_are_told_apart() {
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
    fn a_random_order_prefetches_next_to_nothing() {
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
    fn delivered_tensors_take_no_room_in_the_window() {
        let names = model(9, &["a"]);
        let mut predictor = TensorPredictor::new((0..).zip(names.iter().map(String::as_str)));
        let mut enter = |index: u32| {
            predictor.on_tensor(index, &names[index as usize], MAX_WINDOW_BYTES, |next| {
                if next == 8 { MIB } else { 0 }
            })
        };
        assert!((0..2).all(|index| enter(index).is_empty()));
        assert_eq!(enter(2), [(8, MIB)]);
    }

    #[test]
    fn parsed_names_are_restored() {
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
        let mut predictor = TensorPredictor::default();
        for n in 0..3 * MAX_PATTERN_COUNT as u32 {
            let letters: String = n.to_string().chars().map(|c| (c as u8 + 49) as char).collect();
            predictor.on_tensor(n, &letters, MAX_WINDOW_BYTES, |_| MIB);
            predictor.on_tensor(n, &format!("x.{}", n * n % 7919), MAX_WINDOW_BYTES, |_| MIB);
            predictor.on_tensor(n, &"x.".repeat(MAX_NAME_BYTES), MAX_WINDOW_BYTES, |_| MIB);
            predictor.on_tensor(n, &"1.".repeat(MAX_NUMBERS + 1), MAX_WINDOW_BYTES, |_| MIB);
        }
        assert!(predictor.steps.keys().all(|pattern| pattern.len() <= MAX_NAME_BYTES));
        assert!(
            predictor.steps.len() <= MAX_PATTERN_COUNT
                && predictor.steps.values().all(|steps| steps.len() <= MAX_STEPS_PER_PATTERN)
        );
    }
}
