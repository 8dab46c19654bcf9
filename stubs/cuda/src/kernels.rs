//! Kernels in the text of PTX, and an interpreter of them: of the instructions that a cast of values needs, and of no
//! others. Threads run one after the other. Registers have 64 bits, of which an instruction uses those of its type; their
//! declarations are not read.

use std::collections::BTreeMap;

use crate::host_memory::HostKind;
use crate::memory::Memory;

/// The first line of a kernel that cannot be read.
#[derive(Debug, PartialEq)]
pub struct UnreadLine(pub String);

/// A kernel, whose parameters have 64 bits each.
#[derive(Debug)]
pub struct Kernel {
    pub name: String,
    pub param_count: usize,
    instructions: Vec<Instruction>,
    registers: usize,
}

#[derive(Debug)]
struct Instruction {
    /// The register that must be true.
    guard: Option<usize>,
    action: Action,
}

#[derive(Debug)]
enum Action {
    Return,
    Branch { to: usize },
    Load { to: usize, from: Operand, bytes: usize },
    Store { to: Operand, value: Operand, bytes: usize },
    Compute { to: usize, operation: Operation, operands: [Operand; MAX_OPERANDS] },
}

/// What an instruction computes of its operands.
type Operation = fn([u64; MAX_OPERANDS]) -> u64;

/// No instruction computes with more.
const MAX_OPERANDS: usize = 3;

#[derive(Clone, Copy, Debug)]
enum Operand {
    Register(usize),
    Number(u64),
    Param(usize),
    Block,
    Thread,
    ThreadCount,
}

/// What a launch gives to its threads.
#[derive(Clone, Debug)]
pub struct Launch {
    pub blocks: u32,
    pub threads: u32,
    pub params: Vec<u64>,
}

/// The names of a kernel's text.
#[derive(Default)]
struct Names {
    params: Vec<String>,
    labels: BTreeMap<String, usize>,
    registers: BTreeMap<String, usize>,
}

impl Kernel {
    /// Reads a text with one kernel.
    pub fn parse(text: &str) -> Result<Kernel, UnreadLine> {
        let unread = |line: &str| UnreadLine(line.to_owned());
        let (mut names, mut name, mut lines) = (Names::default(), String::new(), Vec::new());
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if let Some(entry) = line.strip_prefix(".visible .entry ") {
                let (entry_name, params) = entry.split_once('(').ok_or_else(|| unread(line))?;
                entry_name.clone_into(&mut name);
                for param in params.trim_end_matches(')').split(", ") {
                    let param = param.strip_prefix(".param .u64 ").ok_or_else(|| unread(line))?;
                    names.params.push(param.to_owned());
                }
            } else if let Some(label) = line.strip_suffix(':') {
                names.labels.insert(label.to_owned(), lines.len());
            } else if !line.starts_with(['.', '{', '}']) {
                lines.push(line);
            }
        }
        let read = |line: &str| names.read_instruction(line).ok_or_else(|| unread(line));
        let instructions = lines.into_iter().map(read).collect::<Result<_, _>>()?;
        let (param_count, registers) = (names.params.len(), names.registers.len());
        Ok(Kernel { name, param_count, instructions, registers })
    }

    /// Runs all threads; otherwise a description of the fault.
    pub fn run(&self, launch: &Launch, memory: &mut Memory) -> Result<(), String> {
        for block in 0..launch.blocks {
            for thread in 0..launch.threads {
                self.run_thread([block, thread], launch, memory)?;
            }
        }
        Ok(())
    }

    fn run_thread(
        &self,
        [block, thread]: [u32; 2],
        launch: &Launch,
        memory: &mut Memory,
    ) -> Result<(), String> {
        let mut registers = vec![0_u64; self.registers];
        let mut next = 0;
        while let Some(Instruction { guard, action }) = self.instructions.get(next) {
            next += 1;
            if guard.is_some_and(|guard| registers[guard] == 0) {
                continue;
            }
            let value = |operand: Operand| match operand {
                Operand::Register(index) => registers[index],
                Operand::Number(number) => number,
                Operand::Param(index) => launch.params[index],
                Operand::Block => block.into(),
                Operand::Thread => thread.into(),
                Operand::ThreadCount => launch.threads.into(),
            };
            match *action {
                Action::Return => return Ok(()),
                Action::Branch { to } => next = to,
                Action::Load { to, from, bytes } => {
                    registers[to] = read(memory, value(from), bytes)?;
                }
                Action::Store { to, value: from, bytes } => {
                    write(memory, value(to), value(from), bytes)?;
                }
                Action::Compute { to, operation, operands } => {
                    registers[to] = operation(operands.map(value));
                }
            }
        }
        Ok(())
    }
}

impl Names {
    fn read_instruction(&mut self, line: &str) -> Option<Instruction> {
        let line = line.strip_suffix(';')?;
        let (guard, line) = match line.strip_prefix('@') {
            Some(guarded) => {
                let (name, line) = guarded.split_once(' ')?;
                (Some(self.register(name)?), line)
            }
            None => (None, line),
        };
        let (opcode, rest) = line.split_once(' ').unwrap_or((line, ""));
        let words: Vec<&str> = rest.split(", ").filter(|word| !word.is_empty()).collect();
        let action = match (opcode, &words[..]) {
            ("ret", []) => Action::Return,
            ("bra", [label]) => Action::Branch { to: *self.labels.get(*label)? },
            (store, [to, value]) if store.starts_with("st.global.") => {
                let (to, value) = (self.operand(within_brackets(to)?)?, self.operand(value)?);
                Action::Store { to, value, bytes: type_bytes(store)? }
            }
            (load, [to, from]) if load.starts_with("ld.global.") => {
                let (to, from) = (self.register(to)?, self.operand(within_brackets(from)?)?);
                Action::Load { to, from, bytes: type_bytes(load)? }
            }
            ("ld.param.u64", [to, name]) => {
                let name = within_brackets(name)?;
                let index = self.params.iter().position(|param| param == name)?;
                let operands = [Operand::Param(index); MAX_OPERANDS];
                Action::Compute { to: self.register(to)?, operation: |values| values[0], operands }
            }
            (opcode, [to, words @ ..]) => {
                let (operation, operand_count) = operation(opcode)?;
                if words.len() != operand_count {
                    return None;
                }
                let mut operands = [Operand::Number(0); MAX_OPERANDS];
                for (operand, word) in operands.iter_mut().zip(words) {
                    *operand = self.operand(word)?;
                }
                Action::Compute { to: self.register(to)?, operation, operands }
            }
            _ => return None,
        };
        Some(Instruction { guard, action })
    }

    fn register(&mut self, name: &str) -> Option<usize> {
        if !name.starts_with('%') {
            return None;
        }
        let count = self.registers.len();
        Some(*self.registers.entry(name.to_owned()).or_insert(count))
    }

    fn operand(&mut self, word: &str) -> Option<Operand> {
        Some(match word {
            "%ctaid.x" => Operand::Block,
            "%tid.x" => Operand::Thread,
            "%ntid.x" => Operand::ThreadCount,
            name if name.starts_with('%') => Operand::Register(self.register(name)?),
            hex if hex.starts_with("0x") || hex.starts_with("0f") => {
                Operand::Number(u64::from_str_radix(&hex[2..], 16).ok()?)
            }
            number => Operand::Number(number.parse().ok()?),
        })
    }
}

fn within_brackets(word: &str) -> Option<&str> {
    word.strip_prefix('[')?.strip_suffix(']')
}

/// What an instruction computes, and of how many operands.
fn operation(opcode: &str) -> Option<(Operation, usize)> {
    fn float(bits: u64) -> f32 {
        f32::from_bits(bits as u32)
    }
    fn bits(float: f32) -> u64 {
        float.to_bits().into()
    }
    let one: Operation = match opcode {
        "mov.b64" => |[a, ..]| a,
        "mov.b32" | "mov.u32" | "cvt.u64.u32" => |[a, ..]| (a as u32).into(),
        "cvt.u16.u32" | "cvt.u32.u16" => |[a, ..]| (a as u16).into(),
        "cvt.f32.f16" => |[a, ..]| bits(widen_half(a as u16)),
        "cvt.rn.f16.f32" => |[a, ..]| narrow_to_half(float(a)).into(),
        "cvt.f64.f32" => |[a, ..]| f64::from(float(a)).to_bits(),
        "cvt.rn.f32.f64" => |[a, ..]| bits(f64::from_bits(a) as f32),
        _ => return operation_of_several(opcode),
    };
    return Some((one, 1));

    fn operation_of_several(opcode: &str) -> Option<(Operation, usize)> {
        let two: Operation = match opcode {
            "add.u32" => |[a, b, _]| (a as u32).wrapping_add(b as u32).into(),
            "add.u64" => |[a, b, _]| a.wrapping_add(b),
            "and.b32" => |[a, b, _]| (a as u32 & b as u32).into(),
            "or.b32" => |[a, b, _]| (a as u32 | b as u32).into(),
            "shl.b16" => |[a, b, _]| (((a as u32) << b) as u16).into(),
            "shl.b32" => |[a, b, _]| ((a as u32) << b).into(),
            "shr.u32" => |[a, b, _]| (a as u32 >> b).into(),
            "mul.wide.u32" => |[a, b, _]| u64::from(a as u32) * u64::from(b as u32),
            "mul.f32" => |[a, b, _]| bits(float(a) * float(b)),
            "setp.eq.u32" => |[a, b, _]| (a as u32 == b as u32).into(),
            "setp.ge.u64" => |[a, b, _]| (a >= b).into(),
            "setp.nan.f32" => |[a, b, _]| (float(a).is_nan() || float(b).is_nan()).into(),
            "mad.lo.u64" => return Some((|[a, b, c]| a.wrapping_mul(b).wrapping_add(c), 3)),
            "selp.b16" | "selp.b32" | "selp.b64" => {
                return Some((|[a, b, condition]| if condition != 0 { a } else { b }, 3));
            }
            _ => return None,
        };
        Some((two, 2))
    }
}

/// The value of a float of 16 bits.
fn widen_half(bits: u16) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let magnitude = match exponent {
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        0 => fraction * 2_f32.powi(-24),
        _ => (1024.0 + fraction) * 2_f32.powi(exponent - 25),
    };
    if bits >> 15 == 0 { magnitude } else { -magnitude }
}

/// The float of 16 bits that is nearest to a value, to even on a tie.
fn narrow_to_half(value: f32) -> u16 {
    let magnitude = f64::from(value.abs());
    let exponent = ((value.to_bits() >> 23 & 255) as i32 - 127).clamp(-14, 16);
    let units = (magnitude / 2_f64.powi(exponent - 10)).round_ties_even();
    let bits = match magnitude {
        nan if nan.is_nan() => 0x7fff,
        large if large >= 65520.0 => 0x7c00,
        _ => ((exponent + 14) << 10) as u16 + units as u16,
    };
    bits | (u16::from(value.is_sign_negative()) << 15)
}

/// The bytes of the type that an instruction ends with.
fn type_bytes(opcode: &str) -> Option<usize> {
    let bits: usize =
        opcode.rsplit(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()?;
    matches!(bits, 8 | 16 | 32 | 64).then_some(bits / 8)
}

/// Reads a value of device memory, or of host memory that a device sees.
fn read(memory: &Memory, address: u64, bytes: usize) -> Result<u64, String> {
    check_alignment(address, bytes)?;
    let mut value = [0; 8];
    if memory.device.is_device_address(address) {
        value[..bytes].copy_from_slice(memory.device.bytes(address, bytes)?);
        return Ok(u64::from_le_bytes(value));
    }
    match memory.host.kind(address as usize, bytes) {
        HostKind::Pinned(..) | HostKind::Registered(..) => {
            let place = address as *const u8;
            // SAFETY: the memory is pinned, and stays so while work that reads it is queued.
            unsafe { std::ptr::copy_nonoverlapping(place, value.as_mut_ptr(), bytes) };
            Ok(u64::from_le_bytes(value))
        }
        HostKind::Wrong(words) => Err(words),
        HostKind::Pageable => Err(format!("a kernel reads {address:#x}, which no device sees")),
    }
}

fn write(memory: &mut Memory, address: u64, value: u64, bytes: usize) -> Result<(), String> {
    check_alignment(address, bytes)?;
    let place = memory.device.bytes_mut(address, bytes)?;
    place.copy_from_slice(&value.to_le_bytes()[..bytes]);
    Ok(())
}

fn check_alignment(address: u64, bytes: usize) -> Result<(), String> {
    match address.is_multiple_of(bytes as u64) {
        true => Ok(()),
        false => {
            Err(format!("a kernel touches {bytes} bytes at {address:#x}, which is misaligned"))
        }
    }
}
