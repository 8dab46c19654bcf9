//! Which values of a pickle have tensors or objects in them, however deep.

use super::choose::{Fault, MAX_DEPTH};
use super::meaning::{self, Value};
use super::pickle::{Arena, Id};

/// Which values lead to tensors, each answered once.
pub struct Census<'a> {
    arena: &'a Arena,
    /// Per value: 0 not asked, else bits.
    answers: Vec<u8>,
}

const ASKED: u8 = 1;
const TENSORS: u8 = 2;
const OBJECTS: u8 = 4;

/// The answers of a [`Census`].
pub struct Answers(Vec<u8>);

impl Answers {
    /// Whether it is a tensor or has one inside.
    pub fn has_tensors(&self, id: Id) -> bool {
        self.0[Arena::place(id)] & TENSORS != 0
    }

    /// Whether there is neither a tensor nor an object in it.
    pub fn is_plain(&self, id: Id) -> bool {
        self.0[Arena::place(id)] & (TENSORS | OBJECTS) == 0
    }
}

impl<'a> Census<'a> {
    /// Asks everything that can be reached from `top`.
    pub fn of(arena: &'a Arena, top: Id) -> Result<Answers, Fault> {
        let mut census = Census { arena, answers: vec![0; arena.len()] };
        census.ask(top, MAX_DEPTH)?;
        Ok(Answers(census.answers))
    }

    fn ask(&mut self, id: Id, depth: usize) -> Result<u8, Fault> {
        let known = self.answers[Arena::place(id)];
        if known != 0 {
            // A value inside itself is being answered further up: it adds nothing here.
            return Ok(known);
        }
        self.answers[Arena::place(id)] = ASKED;
        let mut answer = ASKED;
        let arena = self.arena;
        let depth = depth.checked_sub(1).ok_or(Fault::TooDeep)?;
        match meaning::value(arena, id) {
            Value::Tensor(_) => answer |= TENSORS,
            Value::Opaque(_) => answer |= OBJECTS,
            Value::Plain => {}
            Value::Entries(entries) => {
                for &(_, value) in entries {
                    answer |= self.ask(value, depth)?;
                }
            }
            Value::Items(items) => {
                for &item in items {
                    answer |= self.ask(item, depth)?;
                }
            }
        }
        self.answers[Arena::place(id)] = answer;
        Ok(answer)
    }
}
