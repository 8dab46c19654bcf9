//! Writes legacy torch files: five pickles, then storages with their counts.

use super::pickle::{NONE, TUPLE, Tensor, dict, int, list, pickle, text, tuple};
use super::zip::floats;

/// The parts of a legacy file.
#[derive(Clone, Debug)]
pub struct Legacy {
    pub magic: Vec<u8>,
    pub protocol: i128,
    pub machine: Vec<u8>,
    pub state: Vec<u8>,
    pub keys: Vec<u8>,
    pub storages: Vec<(i64, Vec<u8>)>,
}

/// `(name, first element, count)` of a storage that is a part of another.
pub type Window = Option<(i128, i128)>;

/// A tensor whose storage states its part of another, as legacy files do.
pub fn tensor(tensor: &Tensor, window: Window) -> Vec<u8> {
    let window = match window {
        Some((first, count)) => tuple(&[text("part"), int(first), int(count)]),
        None => NONE.to_vec(),
    };
    // The persistent id gets a sixth item, before its tuple is closed.
    let id = tensor.storage();
    let longer = [&id[..id.len() - 2], &window, TUPLE, b"Q"].concat();
    let bytes = tensor.bytes();
    let at = bytes.windows(id.len()).position(|part| part == id).expect("its storage is in it");
    [&bytes[..at], &longer, &bytes[at + id.len()..]].concat()
}

/// A file with one tensor, `w`, of six floats.
pub fn one_tensor(tensor: &Tensor, window: Window) -> Legacy {
    Legacy {
        magic: pickle(&int(0x1950_A86A_20F9_469C_FC6C)),
        protocol: 1001,
        machine: dict(&[("little_endian", vec![0x88])]),
        state: dict(&[("w", self::tensor(tensor, window))]),
        keys: list(&[text("0")]),
        storages: vec![(6, floats())],
    }
}

impl Legacy {
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.clone();
        for value in [&int(self.protocol), &self.machine, &self.state, &self.keys] {
            out.extend(pickle(value));
        }
        for (count, bytes) in &self.storages {
            out.extend(count.to_le_bytes());
            out.extend(bytes);
        }
        out
    }
}
