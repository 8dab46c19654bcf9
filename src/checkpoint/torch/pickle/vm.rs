//! The stack machine of the pickle format. It moves numbers about and calls nothing.

use super::PickleError;
use super::arena::{Arena, Node, NodeId};
use super::cursor::PickleCursor;
use super::memo::PickleMemo;

/// The longest pickle that is read: one of 1,000,000 tensors comes to about 150 MB. Positions in
/// the arena are 32 bits wide, which this keeps safe.
pub const MAX_PICKLE_BYTES: u64 = 256 << 20;

/// The most values in one pickle. A tensor takes about 16; at 9 bytes each, this is 144 MB.
const MAX_NODE_COUNT: usize = 16 << 20;

/// The most remembered values, of which a tensor has about 7.
const MAX_MEMO_COUNT: usize = 8 << 20;

/// The most opcodes. A tensor takes about 35.
const MAX_OPCODE_COUNT: u64 = 64 << 20;

/// The most open marks: containers being built inside one another. torch writes fewer than 20.
const MAX_MARK_COUNT: usize = 10_000;

/// The longest whole number that is read, in bytes; torch's magic number has 10.
const MAX_INTEGER_BYTES: usize = 1 << 10;

/// Bytes that the values of a pickle may take, whatever its size in the file. Some thousand tensors fit.
const MIN_ALLOWANCE_BYTES: u64 = 16 << 20;

/// Bytes that values may take for each byte of the pickle in the file. Training checkpoints need 2 to 3, or 11 if
/// compressed.
const MAX_VALUE_BYTES_PER_BYTE: u64 = 24;

/// Bytes that the values of a pickle may take, given the bytes that it takes in its file. So a small file stays small
/// in memory, however well it was compressed.
pub fn memory_allowance(stored: u64) -> u64 {
    stored.saturating_mul(MAX_VALUE_BYTES_PER_BYTE).saturating_add(MIN_ALLOWANCE_BYTES)
}

/// Reads one pickle from the front of `bytes`: its values, the one it stands for, and its length. `stored` is the
/// number of bytes that it takes in its file.
pub fn read_pickle(bytes: &[u8], stored: u64) -> Result<(Arena, NodeId, usize), PickleError> {
    if bytes.len() as u64 > MAX_PICKLE_BYTES {
        return Err(PickleError::CountLimit { what: "bytes", limit: MAX_PICKLE_BYTES });
    }
    let mut machine = PickleVm {
        cursor: PickleCursor::new(bytes),
        opcode: (0, 0),
        arena: Arena::default(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: PickleMemo::default(),
        copied_items: 0,
        allowance_bytes: memory_allowance(stored),
    };
    let top = machine.run()?;
    Ok((machine.arena, top, machine.cursor.position()))
}

struct PickleVm<'a> {
    cursor: PickleCursor<'a>,
    /// The opcode at work and its place, for the message.
    opcode: (u8, usize),
    arena: Arena,
    stack: Vec<NodeId>,
    /// The height of the stack at each open mark.
    marks: Vec<usize>,
    memo: PickleMemo,
    /// Items of lists looked at to make dictionaries: the one work that has no opcode for each.
    copied_items: usize,
    /// Bytes that values, memo and stack may take together.
    allowance_bytes: u64,
}

impl<'a> PickleVm<'a> {
    fn run(&mut self) -> Result<NodeId, PickleError> {
        // Protocol 2 is the first that says so in its first opcode, and the first that torch wrote.
        if self.cursor.read_u8()? != 0x80 {
            return Err(PickleError::Protocol(0));
        }
        match self.cursor.read_u8()? {
            2..=5 => {}
            other => return Err(PickleError::Protocol(other)),
        }
        for _ in 0..MAX_OPCODE_COUNT {
            self.opcode = (0, self.cursor.position());
            let opcode = self.cursor.read_u8()?;
            self.opcode.0 = opcode;
            if opcode == b'.' {
                let top = self.pop()?;
                return if self.marks.is_empty() { Ok(top) } else { Err(self.out_of_order()) };
            }
            self.step(opcode)?;
            if self.arena.len() > MAX_NODE_COUNT {
                return Err(PickleError::CountLimit {
                    what: "values",
                    limit: MAX_NODE_COUNT as u64,
                });
            }
            let stack = self.stack.len() * size_of::<NodeId>();
            if (self.arena.used_bytes() + self.memo.used_bytes() + stack) as u64
                > self.allowance_bytes
            {
                return Err(PickleError::MemoryLimit { limit: self.allowance_bytes });
            }
        }
        Err(PickleError::CountLimit { what: "opcodes", limit: MAX_OPCODE_COUNT })
    }

    fn step(&mut self, opcode: u8) -> Result<(), PickleError> {
        match opcode {
            b'(' => {
                if self.marks.len() == MAX_MARK_COUNT {
                    return Err(PickleError::CountLimit {
                        what: "nested containers",
                        limit: MAX_MARK_COUNT as u64,
                    });
                }
                self.marks.push(self.stack.len());
            }
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            // Numbers, text and other plain values.
            b'N' => self.push(Node::None),
            0x88 => self.push(Node::Bool(true)),
            0x89 => self.push(Node::Bool(false)),
            b'K' => self.push_int(1, false)?,
            b'M' => self.push_int(2, false)?,
            b'J' => self.push_int(4, true)?,
            b'I' | b'L' => self.push_int_line(opcode)?,
            b'F' => {
                self.cursor.read_line()?;
                self.push(Node::Plain);
            }
            b'G' => {
                self.cursor.take(8)?;
                self.push(Node::Plain);
            }
            0x8a => {
                let len = self.cursor.read_len(1)?;
                self.push_long(len)?;
            }
            0x8b => {
                let len = self.cursor.read_len(4)?;
                self.push_long(len)?;
            }
            b'U' | 0x8c => self.push_text(1)?,
            b'T' | b'X' => self.push_text(4)?,
            0x8d => self.push_text(8)?,
            b'C' => self.push_plain(1)?,
            b'B' => self.push_plain(4)?,
            0x8e | 0x96 => self.push_plain(8)?,
            // Containers.
            b')' => self.push_tuple(0)?,
            0x85 => self.push_tuple(1)?,
            0x86 => self.push_tuple(2)?,
            0x87 => self.push_tuple(3)?,
            b't' => {
                let items = self.pop_mark()?;
                let id = self.arena.push_tuple(&items);
                self.stack.push(id);
            }
            b']' => self.push_list(Vec::new()),
            b'l' => {
                let items = self.pop_mark()?;
                self.push_list(items);
            }
            b'}' => self.push_dict(Vec::new()),
            b'd' => {
                let items = self.pop_mark()?;
                let pairs = self.to_pairs(&items)?;
                self.push_dict(pairs);
            }
            0x8f => self.push(Node::Plain),
            0x91 => {
                self.pop_mark()?;
                self.push(Node::Plain);
            }
            b'a' => {
                let item = self.pop()?;
                self.append(&[item])?;
            }
            b'e' => {
                let items = self.pop_mark()?;
                self.append(&items)?;
            }
            0x90 => {
                self.pop_mark()?;
                self.top().map(drop)?;
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set_items(&[key, value])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set_items(&items)?;
            }
            // Names, and what would be done with them.
            b'c' => {
                let module = self.push_name_line()?;
                let name = self.push_name_line()?;
                self.push(Node::Global(module, name));
            }
            0x93 => {
                let name = self.pop()?;
                let module = self.pop()?;
                if self.arena.text(name).is_none() || self.arena.text(module).is_none() {
                    return Err(self.out_of_order());
                }
                self.push(Node::Global(module, name));
            }
            b'R' => {
                let args = self.pop()?;
                let callable = self.pop()?;
                self.call(callable, args)?;
            }
            0x81 => {
                let args = self.pop()?;
                let class = self.pop()?;
                self.call(class, args)?;
            }
            0x92 => {
                self.pop()?;
                let args = self.pop()?;
                let class = self.pop()?;
                self.call(class, args)?;
            }
            b'i' => {
                self.cursor.read_line()?;
                self.cursor.read_line()?;
                self.pop_mark()?;
                self.push(Node::Opaque("an instance of an old-style class"));
            }
            b'o' => {
                self.pop_mark()?;
                self.push(Node::Opaque("an instance of an old-style class"));
            }
            0x82 => self.push_extension(1)?,
            0x83 => self.push_extension(2)?,
            0x84 => self.push_extension(4)?,
            b'b' => {
                self.pop()?;
                let target = self.top()?;
                // A dictionary's attributes (a state dict's `_metadata`) are not its entries.
                if !matches!(self.arena.node(target), Node::Dict(_)) {
                    self.arena.mark_modified(target);
                }
            }
            b'Q' => {
                let key = self.pop()?;
                self.push(Node::Persistent(key));
            }
            // The memo.
            b'q' | b'r' | b'p' => {
                let slot = self.read_slot(opcode)?;
                let top = self.top()?;
                self.memoize(slot, top)?;
            }
            0x94 => {
                let top = self.top()?;
                self.memoize(self.memo.len() as u32, top)?;
            }
            b'h' | b'j' | b'g' => {
                let slot = self.read_slot(opcode)?;
                let id = self.memo.get(slot).ok_or_else(|| self.out_of_order())?;
                self.stack.push(id);
            }
            0x95 => {
                // A frame is a hint for readers that wait for their bytes; it must still fit.
                let len = self.cursor.read_len(8)?;
                if len > self.cursor.remaining() {
                    return Err(PickleError::Truncated);
                }
            }
            _ => {
                return Err(PickleError::Opcode { opcode, at: self.opcode.1 });
            }
        }
        if self.stack.len() > MAX_NODE_COUNT {
            return Err(PickleError::CountLimit { what: "values", limit: MAX_NODE_COUNT as u64 });
        }
        Ok(())
    }

    fn out_of_order(&self) -> PickleError {
        PickleError::OutOfOrder { opcode: self.opcode.0, at: self.opcode.1 }
    }

    fn malformed(&self) -> PickleError {
        PickleError::MalformedValue { at: self.opcode.1 }
    }

    fn push(&mut self, node: Node) {
        let id = self.arena.push(node);
        self.stack.push(id);
    }

    fn push_list(&mut self, items: Vec<NodeId>) {
        let id = self.arena.push_list(items);
        self.stack.push(id);
    }

    fn push_dict(&mut self, entries: Vec<(NodeId, NodeId)>) {
        let id = self.arena.push_dict(entries);
        self.stack.push(id);
    }

    /// The values above the last mark are out of reach of anything but what closes the mark.
    fn stack_floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<NodeId, PickleError> {
        if self.stack.len() <= self.stack_floor() {
            return Err(self.out_of_order());
        }
        self.stack.pop().ok_or_else(|| self.out_of_order())
    }

    fn top(&self) -> Result<NodeId, PickleError> {
        match self.stack.last() {
            Some(&id) if self.stack.len() > self.stack_floor() => Ok(id),
            _ => Err(self.out_of_order()),
        }
    }

    fn pop_mark(&mut self) -> Result<Vec<NodeId>, PickleError> {
        let mark = self.marks.pop().ok_or_else(|| self.out_of_order())?;
        Ok(self.stack.split_off(mark))
    }

    fn push_name_line(&mut self) -> Result<NodeId, PickleError> {
        let line = self.cursor.read_line()?;
        if line.is_empty() || std::str::from_utf8(line).is_err() {
            return Err(self.malformed());
        }
        Ok(self.arena.push_text(line))
    }

    fn push_int(&mut self, width: usize, signed: bool) -> Result<(), PickleError> {
        let value = self.cursor.read_uint(width)?;
        let value = if signed { i64::from(value as u32 as i32) } else { value as i64 };
        self.push(Node::Int(value));
        Ok(())
    }

    /// The decimal forms, which Python 2 used for numbers past 32 bits even in protocol 2.
    fn push_int_line(&mut self, opcode: u8) -> Result<(), PickleError> {
        let line = self.cursor.read_line()?;
        let node = match (opcode, line) {
            (b'I', b"00") => Node::Bool(false),
            (b'I', b"01") => Node::Bool(true),
            _ => {
                let digits = line.strip_suffix(b"L").unwrap_or(line);
                let text = std::str::from_utf8(digits).map_err(|_| self.malformed())?;
                let bare = text.strip_prefix('-').unwrap_or(text);
                if bare.is_empty()
                    || bare.len() > MAX_INTEGER_BYTES
                    || !bare.bytes().all(|b| b.is_ascii_digit())
                {
                    return Err(self.malformed());
                }
                text.parse().map_or(Node::Plain, Node::Int)
            }
        };
        self.push(node);
        Ok(())
    }

    fn push_long(&mut self, len: usize) -> Result<(), PickleError> {
        if len > MAX_INTEGER_BYTES {
            return Err(PickleError::CountLimit {
                what: "bytes in a whole number",
                limit: MAX_INTEGER_BYTES as u64,
            });
        }
        let raw = self.cursor.take(len)?;
        let node = match len {
            0..=8 => {
                let negative = raw.last().is_some_and(|b| b & 0x80 != 0);
                let mut wide = [if negative { 0xff } else { 0 }; 8];
                wide[..len].copy_from_slice(raw);
                Node::Int(i64::from_le_bytes(wide))
            }
            _ => Node::Long(self.arena.store_bytes(raw)),
        };
        self.push(node);
        Ok(())
    }

    fn push_text(&mut self, width: usize) -> Result<(), PickleError> {
        let len = self.cursor.read_len(width)?;
        let text = self.cursor.take(len)?;
        let id = self.arena.push_text(text);
        self.stack.push(id);
        Ok(())
    }

    fn push_plain(&mut self, width: usize) -> Result<(), PickleError> {
        let len = self.cursor.read_len(width)?;
        self.cursor.take(len)?;
        self.push(Node::Plain);
        Ok(())
    }

    fn push_tuple(&mut self, len: usize) -> Result<(), PickleError> {
        let mut items = [NodeId(0); 3];
        for item in items[..len].iter_mut().rev() {
            *item = self.pop()?;
        }
        let id = self.arena.push_tuple(&items[..len]);
        self.stack.push(id);
        Ok(())
    }

    fn to_pairs(&self, items: &[NodeId]) -> Result<Vec<(NodeId, NodeId)>, PickleError> {
        if !items.len().is_multiple_of(2) {
            return Err(self.out_of_order());
        }
        Ok(items.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
    }

    fn append(&mut self, items: &[NodeId]) -> Result<(), PickleError> {
        let target = self.top()?;
        match self.arena.node(target) {
            Node::List(list) => self.arena.extend_list(list, items),
            Node::Call(..) | Node::Opaque(_) => self.arena.mark_modified(target),
            _ => return Err(self.out_of_order()),
        }
        Ok(())
    }

    fn set_items(&mut self, items: &[NodeId]) -> Result<(), PickleError> {
        let pairs = self.to_pairs(items)?;
        let target = self.top()?;
        match self.arena.node(target) {
            Node::Dict(dict) => self.arena.extend_dict(dict, &pairs),
            Node::Call(..) | Node::Opaque(_) => self.arena.mark_modified(target),
            _ => return Err(self.out_of_order()),
        }
        Ok(())
    }

    /// Notes a call. The standard library's dictionaries become dictionaries: torch's state dicts
    /// are made by such calls, and calling them does nothing else.
    fn call(&mut self, callable: NodeId, args: NodeId) -> Result<(), PickleError> {
        let given = match self.arena.node(args) {
            Node::Tuple(_) => self.arena.items(args).unwrap_or_default(),
            _ => return Err(self.out_of_order()),
        };
        let entries = match (self.arena.global(callable), given) {
            (Some(("collections", "OrderedDict")), []) => Some(Vec::new()),
            (Some(("collections", "OrderedDict")), &[pairs]) => {
                self.copied_items += self.arena.items(pairs).map_or(0, <[NodeId]>::len);
                if self.copied_items > MAX_NODE_COUNT {
                    return Err(PickleError::CountLimit {
                        what: "values",
                        limit: MAX_NODE_COUNT as u64,
                    });
                }
                self.entries_of_pairs(pairs)
            }
            (Some(("collections", "defaultdict")), [] | [_]) => Some(Vec::new()),
            _ => None,
        };
        match entries {
            Some(entries) => self.push_dict(entries),
            None => self.push(Node::Call(callable, args)),
        }
        Ok(())
    }

    /// The argument with which Python 2 wrote an ordered dictionary: a list of pairs.
    fn entries_of_pairs(&self, list: NodeId) -> Option<Vec<(NodeId, NodeId)>> {
        let pair = |&id: &NodeId| match self.arena.items(id)? {
            &[key, value] => Some((key, value)),
            _ => None,
        };
        self.arena.items(list)?.iter().map(pair).collect()
    }

    fn push_extension(&mut self, width: usize) -> Result<(), PickleError> {
        self.cursor.take(width)?;
        self.push(Node::Opaque("an extension object"));
        Ok(())
    }

    fn memoize(&mut self, slot: u32, id: NodeId) -> Result<(), PickleError> {
        self.memo.insert(slot, id);
        if self.memo.len() > MAX_MEMO_COUNT {
            return Err(PickleError::CountLimit {
                what: "remembered values",
                limit: MAX_MEMO_COUNT as u64,
            });
        }
        Ok(())
    }

    fn read_slot(&mut self, opcode: u8) -> Result<u32, PickleError> {
        match opcode {
            b'q' | b'h' => Ok(u32::from(self.cursor.read_u8()?)),
            b'r' | b'j' => Ok(self.cursor.read_uint(4)? as u32),
            _ => {
                let line =
                    std::str::from_utf8(self.cursor.read_line()?).map_err(|_| self.malformed())?;
                line.parse().map_err(|_| self.malformed())
            }
        }
    }
}
