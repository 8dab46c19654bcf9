//! Assembles pickles opcode by opcode.

/// Opcodes that the tests use by name.
pub const MARK: &[u8] = b"(";
pub const TUPLE: &[u8] = b"t";
pub const REDUCE: &[u8] = b"R";
pub const BUILD: &[u8] = b"b";
pub const PERSISTENT: &[u8] = b"Q";
pub const NONE: &[u8] = b"N";
pub const TRUE: &[u8] = b"\x88";
pub const FALSE: &[u8] = b"\x89";
pub const POP: &[u8] = b"0";
pub const EMPTY_DICT: &[u8] = b"}";
pub const EMPTY_LIST: &[u8] = b"]";
pub const SET_ITEMS: &[u8] = b"u";
pub const APPEND: &[u8] = b"a";
pub const APPENDS: &[u8] = b"e";

/// A whole pickle of protocol 2 of one value.
pub fn pickle(value: &[u8]) -> Vec<u8> {
    [b"\x80\x02", value, b"."].concat()
}

pub fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

/// An integer of up to 127 bits, in its shortest form of whole bytes.
pub fn int(n: i128) -> Vec<u8> {
    let bytes = n.to_le_bytes();
    let len = (1..=16).find(|&len| sign_extended(&bytes[..len]) == n).unwrap_or(16);
    [&[0x8a, len as u8], &bytes[..len]].concat()
}

fn sign_extended(bytes: &[u8]) -> i128 {
    let fill = if bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
    let mut wide = [fill; 16];
    wide[..bytes.len()].copy_from_slice(bytes);
    i128::from_le_bytes(wide)
}

pub fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
    [MARK, &items.concat(), TUPLE].concat()
}

pub fn list(items: &[Vec<u8>]) -> Vec<u8> {
    [EMPTY_LIST, MARK, &items.concat(), APPENDS].concat()
}

pub fn dict(entries: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let entries = entries.iter().map(|(key, value)| [text(key), value.clone()].concat());
    [EMPTY_DICT, MARK, &entries.collect::<Vec<_>>().concat(), SET_ITEMS].concat()
}

pub fn global(module: &str, name: &str) -> Vec<u8> {
    format!("c{module}\n{name}\n").into_bytes()
}

/// A call with these arguments.
pub fn call(callable: &[u8], args: &[Vec<u8>]) -> Vec<u8> {
    [callable, &tuple(args), REDUCE].concat()
}

/// Puts the top of the stack into a memo slot.
pub fn put(slot: u32) -> Vec<u8> {
    [b"r", &slot.to_le_bytes()[..]].concat()
}

/// Gets a value from a memo slot.
pub fn get(slot: u32) -> Vec<u8> {
    [b"j", &slot.to_le_bytes()[..]].concat()
}

/// A tensor as `torch.save` writes it, with the fields that a test makes wrong.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub function: &'static str,
    pub class: &'static str,
    pub key: &'static str,
    pub location: &'static str,
    pub count: i128,
    pub offset: i128,
    pub shape: Vec<i128>,
    pub stride: Vec<i128>,
}

/// Storage `0` of these archives holds six floats, shown as two rows of three.
pub const STORED_FLOATS: i128 = 6;

impl Default for Tensor {
    fn default() -> Self {
        Tensor {
            function: "_rebuild_tensor_v2",
            class: "FloatStorage",
            key: "0",
            location: "cpu",
            count: STORED_FLOATS,
            offset: 0,
            shape: vec![2, 3],
            stride: vec![3, 1],
        }
    }
}

impl Tensor {
    pub fn storage(&self) -> Vec<u8> {
        let (key, location) = (text(self.key), text(self.location));
        let class = global("torch", self.class);
        let id = tuple(&[text("storage"), class, key, location, int(self.count)]);
        [&id, PERSISTENT].concat()
    }

    pub fn bytes(&self) -> Vec<u8> {
        let ints = |list: &[i128]| tuple(&list.iter().map(|&n| int(n)).collect::<Vec<_>>());
        let hooks = call(&global("collections", "OrderedDict"), &[]);
        let (shape, stride) = (ints(&self.shape), ints(&self.stride));
        let args = [self.storage(), int(self.offset), shape, stride, FALSE.to_vec(), hooks];
        call(&global("torch._utils", self.function), &args)
    }
}
