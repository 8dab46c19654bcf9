//! Gives the entries of the chosen dictionary their names, nested ones joined with dots.

use crate::checkpoint::truncated_list::Listed;
use crate::checkpoint::{MAX_HEADER, MAX_TENSORS, Refused, TensorFault};

use super::interpret::{self, Value, key_text};
use super::pickle::{Arena, Id};
use super::reachability::Census;
use super::select_error::Fault;

/// Values looked at while naming entries. A dictionary that is used in many places is looked at
/// in each, and only this and the next keep a small pickle from having more names than memory can hold.
const MAX_VISITS: usize = 4 * MAX_TENSORS;

/// Bytes that an entry takes in a header beside its name, at the least:
/// `:{"dtype":"F32","shape":[],"data_offsets":[0,0]},` and the quotes of the name.
const MIN_ENTRY: usize = 50;

/// Bytes that names may take in a header, whatever the size of the pickle in its file.
const MIN_ROOM: u64 = 1 << 20;

/// Bytes that names may take for each byte that the pickle takes in its file. Training checkpoints need less than 1,
/// or 5 if compressed. A tensor that appears in thousands of places needs 50 for each place.
const MAX_PER_BYTE: u64 = 16;

/// The entries of the chosen dictionary.
#[derive(Debug, Default)]
pub struct Chosen {
    /// Those that are tensors: name and value.
    pub entries: Vec<(String, Id)>,
    pub refused: Vec<Refused>,
    pub notes: Vec<String>,
}

/// Gives every entry its dotted name.
pub struct Naming<'a> {
    arena: &'a Arena,
    census: &'a Census,
    chosen: Chosen,
    left_out: Listed,
    visits: usize,
    /// Bytes of a header that the names so far leave.
    room: u64,
}

impl<'a> Naming<'a> {
    pub fn new(arena: &'a Arena, census: &'a Census, chosen: Chosen, stored: u64) -> Self {
        let room = MAX_HEADER.min(MIN_ROOM.saturating_add(stored.saturating_mul(MAX_PER_BYTE)));
        Naming { arena, census, chosen, left_out: Listed::default(), visits: 0, room }
    }

    /// What was named, and what was left out.
    pub fn end(self) -> (Chosen, Listed) {
        (self.chosen, self.left_out)
    }

    /// Names the entries of a dictionary, list or tuple, and what is inside them.
    pub fn name_all(&mut self, prefix: &str, at: Id, depth: usize) -> Result<(), Fault> {
        let depth = depth.checked_sub(1).ok_or(Fault::TooDeep)?;
        if let Some(entries) = self.arena.entries(at) {
            for (place, &(key, value)) in entries.iter().enumerate() {
                match key_text(self.arena, key) {
                    Some(key) => self.name_one(prefix, &key, value, depth)?,
                    None if self.census.is_plain(value) => {
                        self.left_out.add(|| format!("{prefix}?"))
                    }
                    None => self.add(format!("{prefix}?{place}"), value, Some(TensorFault::Key))?,
                }
            }
        } else {
            for (place, &value) in self.arena.items(at).unwrap_or_default().iter().enumerate() {
                self.name_one(prefix, &place.to_string(), value, depth)?;
            }
        }
        Ok(())
    }

    fn name_one(&mut self, prefix: &str, key: &str, id: Id, depth: usize) -> Result<(), Fault> {
        self.visits += 1;
        if self.visits > MAX_VISITS {
            return Err(Fault::TooDeep);
        }
        let name = || format!("{prefix}{key}");
        match interpret::value(self.arena, id) {
            Value::Tensor(tensor) => self.add(name(), id, tensor.err()),
            Value::Opaque(class) => self.add(name(), id, Some(TensorFault::Opaque { class })),
            _ if self.census.is_plain(id) => {
                self.left_out.add(name);
                Ok(())
            }
            _ => {
                let prefix = name() + ".";
                self.take_room(prefix.len())?;
                self.name_all(&prefix, id, depth)
            }
        }
    }

    /// Every name that is put together takes room, or a small pickle could ask for endless ones.
    fn take_room(&mut self, bytes: usize) -> Result<(), Fault> {
        self.room = self.room.checked_sub(bytes as u64).ok_or(Fault::TooLong)?;
        Ok(())
    }

    /// Adds a tensor, or what is refused.
    pub fn add(&mut self, name: String, id: Id, fault: Option<TensorFault>) -> Result<(), Fault> {
        self.take_room(MIN_ENTRY + name.len())?;
        let fault = if name == "__metadata__" { Some(TensorFault::Reserved) } else { fault };
        match fault {
            None => self.chosen.entries.push((name, id)),
            Some(fault) => self.chosen.refused.push(Refused { name, fault }),
        }
        Ok(())
    }
}
