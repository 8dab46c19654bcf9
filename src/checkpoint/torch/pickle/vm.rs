//! The stack machine of the pickle format. It moves numbers about and calls nothing.

use super::arena::{Arena, Node, NodeId};
use super::cursor::PickleCursor;
use super::error::PickleError;
use super::integer::{decode_long, parse_decimal};
use super::limits::{
    MAX_INTEGER_BYTES, MAX_MARK_COUNT, MAX_MEMO_COUNT, MAX_NODE_COUNT, MAX_OPCODE_COUNT,
    MAX_PICKLE_BYTES, memory_allowance,
};
use super::memo::PickleMemo;
use super::opcode::*;
use super::stack::MarkedStack;

/// What stands for an instance of an old-style class.
const OLD_STYLE_INSTANCE: Node = Node::Opaque("an instance of an old-style class");

/// Reads one pickle from the front of `bytes`: its values, the value that it stands for, and its length. It takes
/// `stored_len` bytes in its file.
pub fn read_pickle(bytes: &[u8], stored_len: u64) -> Result<(Arena, NodeId, usize), PickleError> {
    if bytes.len() as u64 > MAX_PICKLE_BYTES {
        return Err(PickleError::CountLimit { what: "bytes", limit: MAX_PICKLE_BYTES });
    }
    let mut vm = PickleVm {
        cursor: PickleCursor::new(bytes),
        opcode: (0, 0),
        arena: Arena::default(),
        stack: MarkedStack::default(),
        memo: PickleMemo::default(),
        copied_items: 0,
        allowance_bytes: memory_allowance(stored_len),
    };
    let top = vm.run()?;
    Ok((vm.arena, top, vm.cursor.position()))
}

fn too_many(what: &'static str, limit: usize) -> PickleError {
    PickleError::CountLimit { what, limit: limit as u64 }
}

struct PickleVm<'a> {
    cursor: PickleCursor<'a>,
    /// The current opcode and its offset, for messages.
    opcode: (u8, usize),
    arena: Arena,
    stack: MarkedStack,
    memo: PickleMemo,
    /// Items of lists that were turned into dictionaries: the only work without an opcode for each item.
    copied_items: usize,
    /// Bytes that values, memo and stack may take together.
    allowance_bytes: u64,
}

impl<'a> PickleVm<'a> {
    fn run(&mut self) -> Result<NodeId, PickleError> {
        // Protocol 2 is the first that states itself, and the first that torch wrote.
        if self.cursor.read_u8()? != PROTO {
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
            if opcode == STOP {
                let top = self.pop()?;
                let is_closed = self.stack.mark_count() == 0;
                return if is_closed { Ok(top) } else { Err(self.out_of_order()) };
            }
            self.step(opcode)?;
            if self.arena.len() > MAX_NODE_COUNT {
                return Err(too_many("values", MAX_NODE_COUNT));
            }
            let used_bytes =
                self.arena.used_bytes() + self.memo.used_bytes() + self.stack.used_bytes();
            if used_bytes as u64 > self.allowance_bytes {
                return Err(PickleError::MemoryLimit { limit: self.allowance_bytes });
            }
        }
        Err(PickleError::CountLimit { what: "opcodes", limit: MAX_OPCODE_COUNT })
    }

    fn step(&mut self, opcode: u8) -> Result<(), PickleError> {
        match opcode {
            MARK => {
                if self.stack.mark_count() == MAX_MARK_COUNT {
                    return Err(too_many("nested containers", MAX_MARK_COUNT));
                }
                self.stack.push_mark();
            }
            POP => drop(self.pop()?),
            POP_MARK => drop(self.pop_mark()?),
            DUP => {
                let top = self.top()?;
                self.stack.push(top);
            }
            // Numbers, text and other plain values.
            NONE => self.push(Node::None),
            NEWTRUE => self.push(Node::Bool(true)),
            NEWFALSE => self.push(Node::Bool(false)),
            BININT1 => self.push_int(1, false)?,
            BININT2 => self.push_int(2, false)?,
            BININT => self.push_int(4, true)?,
            INT | LONG => self.push_int_line(opcode)?,
            FLOAT => {
                self.cursor.read_line()?;
                self.push(Node::Plain);
            }
            BINFLOAT => {
                self.cursor.take(8)?;
                self.push(Node::Plain);
            }
            LONG1 => {
                let len = self.cursor.read_len(1)?;
                self.push_long(len)?;
            }
            LONG4 => {
                let len = self.cursor.read_len(4)?;
                self.push_long(len)?;
            }
            SHORT_BINSTRING | SHORT_BINUNICODE => self.push_text(1)?,
            BINSTRING | BINUNICODE => self.push_text(4)?,
            BINUNICODE8 => self.push_text(8)?,
            SHORT_BINBYTES => self.push_plain(1)?,
            BINBYTES => self.push_plain(4)?,
            BINBYTES8 | BYTEARRAY8 => self.push_plain(8)?,
            // Containers.
            EMPTY_TUPLE => self.push_tuple(0)?,
            TUPLE1 => self.push_tuple(1)?,
            TUPLE2 => self.push_tuple(2)?,
            TUPLE3 => self.push_tuple(3)?,
            TUPLE => {
                let items = self.pop_mark()?;
                let id = self.arena.push_tuple(&items);
                self.stack.push(id);
            }
            EMPTY_LIST => self.push_list(Vec::new()),
            LIST => {
                let items = self.pop_mark()?;
                self.push_list(items);
            }
            EMPTY_DICT => self.push_dict(Vec::new()),
            DICT => {
                let items = self.pop_mark()?;
                let pairs = self.to_pairs(&items)?;
                self.push_dict(pairs);
            }
            EMPTY_SET => self.push(Node::Plain),
            FROZENSET => {
                self.pop_mark()?;
                self.push(Node::Plain);
            }
            APPEND => {
                let item = self.pop()?;
                self.append(&[item])?;
            }
            APPENDS => {
                let items = self.pop_mark()?;
                self.append(&items)?;
            }
            ADDITEMS => {
                self.pop_mark()?;
                self.top().map(drop)?;
            }
            SETITEM => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set_items(&[key, value])?;
            }
            SETITEMS => {
                let items = self.pop_mark()?;
                self.set_items(&items)?;
            }
            // Classes and functions, and calls of them.
            GLOBAL => {
                let module = self.push_name_line()?;
                let name = self.push_name_line()?;
                self.push(Node::Global(module, name));
            }
            STACK_GLOBAL => {
                let name = self.pop()?;
                let module = self.pop()?;
                if self.arena.text(name).is_none() || self.arena.text(module).is_none() {
                    return Err(self.out_of_order());
                }
                self.push(Node::Global(module, name));
            }
            REDUCE | NEWOBJ => {
                let args = self.pop()?;
                let callable = self.pop()?;
                self.call(callable, args)?;
            }
            NEWOBJ_EX => {
                self.pop()?;
                let args = self.pop()?;
                let class = self.pop()?;
                self.call(class, args)?;
            }
            INST => {
                self.cursor.read_line()?;
                self.cursor.read_line()?;
                self.pop_mark()?;
                self.push(OLD_STYLE_INSTANCE);
            }
            OBJ => {
                self.pop_mark()?;
                self.push(OLD_STYLE_INSTANCE);
            }
            EXT1 => self.push_extension(1)?,
            EXT2 => self.push_extension(2)?,
            EXT4 => self.push_extension(4)?,
            BUILD => {
                let state = self.pop()?;
                let target = self.top()?;
                // A dictionary's attributes (a state dict's `_metadata`) are not its entries.
                if !matches!(self.arena.node(target), Node::Dict(_)) {
                    self.arena.set_state(target, state);
                }
            }
            BINPERSID => {
                let key = self.pop()?;
                self.push(Node::Persistent(key));
            }
            // The memo.
            BINPUT | LONG_BINPUT | PUT => {
                let slot = self.read_slot(opcode)?;
                let top = self.top()?;
                self.memoize(slot, top)?;
            }
            MEMOIZE => {
                let top = self.top()?;
                self.memoize(self.memo.len() as u32, top)?;
            }
            BINGET | LONG_BINGET | GET => {
                let slot = self.read_slot(opcode)?;
                let id = self.memo.get(slot).ok_or_else(|| self.out_of_order())?;
                self.stack.push(id);
            }
            FRAME => {
                // A frame is a hint for readers that read ahead. It must still fit.
                let len = self.cursor.read_len(8)?;
                if len > self.cursor.remaining() {
                    return Err(PickleError::Truncated);
                }
            }
            _ => return Err(PickleError::Opcode { opcode, at: self.opcode.1 }),
        }
        if self.stack.len() > MAX_NODE_COUNT {
            return Err(too_many("values", MAX_NODE_COUNT));
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

    fn pop(&mut self) -> Result<NodeId, PickleError> {
        self.stack.pop().ok_or_else(|| self.out_of_order())
    }

    fn top(&self) -> Result<NodeId, PickleError> {
        self.stack.top().ok_or_else(|| self.out_of_order())
    }

    fn pop_mark(&mut self) -> Result<Vec<NodeId>, PickleError> {
        self.stack.pop_mark().ok_or_else(|| self.out_of_order())
    }

    fn push_name_line(&mut self) -> Result<NodeId, PickleError> {
        let line = self.cursor.read_line()?;
        if line.is_empty() || std::str::from_utf8(line).is_err() {
            return Err(self.malformed());
        }
        Ok(self.arena.push_text(line))
    }

    fn push_int(&mut self, width: usize, is_signed: bool) -> Result<(), PickleError> {
        let value = self.cursor.read_uint(width)?;
        let value = if is_signed { i64::from(value as u32 as i32) } else { value as i64 };
        self.push(Node::Int(value));
        Ok(())
    }

    /// Pushes a number in decimal digits. Python 2 used this form for numbers past 32 bits, even in protocol 2.
    fn push_int_line(&mut self, opcode: u8) -> Result<(), PickleError> {
        let line = self.cursor.read_line()?;
        let node = match (opcode, line) {
            (INT, b"00") => Node::Bool(false),
            (INT, b"01") => Node::Bool(true),
            _ => {
                parse_decimal(line).ok_or_else(|| self.malformed())?.map_or(Node::Plain, Node::Int)
            }
        };
        self.push(node);
        Ok(())
    }

    fn push_long(&mut self, len: usize) -> Result<(), PickleError> {
        if len > MAX_INTEGER_BYTES {
            return Err(too_many("bytes in a whole number", MAX_INTEGER_BYTES));
        }
        let raw = self.cursor.take(len)?;
        let node = match decode_long(raw) {
            Some(value) => Node::Int(value),
            None => Node::Long(self.arena.store_bytes(raw)),
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

    /// Records a call. A call of one of the standard library's dictionary classes becomes a dictionary: torch writes
    /// state dicts so, and such a call does nothing else.
    fn call(&mut self, callable: NodeId, args: NodeId) -> Result<(), PickleError> {
        let items = match self.arena.node(args) {
            Node::Tuple(_) => self.arena.items(args).unwrap_or_default(),
            _ => return Err(self.out_of_order()),
        };
        let entries = match (self.arena.global(callable), items) {
            (Some(("collections", "OrderedDict")), []) => Some(Vec::new()),
            (Some(("collections", "OrderedDict")), &[pairs]) => {
                self.copied_items += self.arena.items(pairs).map_or(0, <[NodeId]>::len);
                if self.copied_items > MAX_NODE_COUNT {
                    return Err(too_many("values", MAX_NODE_COUNT));
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

    /// The entries in a list of pairs, the form in which Python 2 wrote an ordered dictionary.
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
            return Err(too_many("remembered values", MAX_MEMO_COUNT));
        }
        Ok(())
    }

    fn read_slot(&mut self, opcode: u8) -> Result<u32, PickleError> {
        match opcode {
            BINPUT | BINGET => Ok(u32::from(self.cursor.read_u8()?)),
            LONG_BINPUT | LONG_BINGET => Ok(self.cursor.read_uint(4)? as u32),
            _ => {
                let line =
                    std::str::from_utf8(self.cursor.read_line()?).map_err(|_| self.malformed())?;
                line.parse().map_err(|_| self.malformed())
            }
        }
    }
}
