//! Kernels in the text of PTX, and an interpreter of them: of the instructions that a cast of values needs, and of no
//! others. Threads run one after the other. Registers have 64 bits, of which an instruction uses those of its type.

use std::collections::BTreeMap;

use crate::host_memory::HostKind;
use crate::memory::Memory;

/// The first instruction of a kernel that cannot be read.
#[derive(Debug, PartialEq)]
pub struct UnreadLine(pub String);

/// A kernel, and the names of its parameters, of 64 bits each.
#[derive(Debug)]
pub struct Kernel {
    pub name: String,
    pub params: Vec<String>,
    instructions: Vec<Instruction>,
    labels: BTreeMap<String, usize>,
    registers: usize,
}

#[derive(Debug)]
struct Instruction {
    /// The register that must be true.
    guard: Option<usize>,
    opcode: String,
    operands: Vec<Operand>,
}

#[derive(Clone, Debug)]
enum Operand {
    Register(usize),
    Special(Special),
    Number(u64),
    /// A parameter, or where to go on.
    Name(String),
}

#[derive(Clone, Copy, Debug)]
enum Special {
    Block,
    BlockCount,
    Thread,
    ThreadCount,
}

/// No instruction has more.
const MAX_OPERANDS: usize = 4;

/// What a launch gives to its threads.
#[derive(Clone, Debug)]
pub struct Launch {
    pub blocks: u32,
    pub threads: u32,
    pub params: Vec<u64>,
}

impl Kernel {
    /// Reads a text with one kernel.
    pub fn parse(text: &str) -> Result<Kernel, UnreadLine> {
        let unread = |line: &str| UnreadLine(line.to_owned());
        let mut names = BTreeMap::new();
        let mut kernel = Kernel {
            name: String::new(),
            params: Vec::new(),
            instructions: Vec::new(),
            labels: BTreeMap::new(),
            registers: 0,
        };
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if let Some(entry) = line.strip_prefix(".visible .entry ") {
                let (name, params) = entry.split_once('(').ok_or_else(|| unread(line))?;
                kernel.name = name.to_owned();
                for param in params.trim_end_matches(')').split(", ") {
                    let name = param.strip_prefix(".param .u64 ").ok_or_else(|| unread(line))?;
                    kernel.params.push(name.to_owned());
                }
            } else if let Some(label) = line.strip_suffix(':') {
                kernel.labels.insert(label.to_owned(), kernel.instructions.len());
            } else if !line.starts_with(['.', '{', '}']) {
                let line = line.strip_suffix(';').ok_or_else(|| unread(line))?;
                let instruction = read_instruction(line, &mut names);
                kernel.instructions.push(instruction.ok_or_else(|| unread(line))?);
            }
        }
        kernel.registers = names.len();
        let is_known = |one: &&Instruction| !OPCODES.contains(&one.opcode.as_str());
        match kernel.instructions.iter().find(is_known) {
            Some(strange) => Err(UnreadLine(strange.opcode.clone())),
            None => Ok(kernel),
        }
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
        while let Some(Instruction { guard, opcode, operands }) = self.instructions.get(next) {
            next += 1;
            if guard.is_some_and(|guard| registers[guard] == 0) {
                continue;
            }
            let mut values = [0; MAX_OPERANDS];
            for (value, operand) in values.iter_mut().zip(operands) {
                *value = match operand {
                    Operand::Register(index) => registers[*index],
                    Operand::Number(number) => *number,
                    Operand::Special(Special::Block) => block.into(),
                    Operand::Special(Special::Thread) => thread.into(),
                    Operand::Special(Special::BlockCount) => launch.blocks.into(),
                    Operand::Special(Special::ThreadCount) => launch.threads.into(),
                    Operand::Name(name) => self.number_of(name, launch).unwrap_or(0),
                };
            }
            match opcode.as_str() {
                "ret" => return Ok(()),
                "bra" => next = values[0] as usize,
                store if store.starts_with("st.") => {
                    write(memory, values[0], values[1], type_bytes(store))?;
                }
                opcode => {
                    let value = match opcode.strip_prefix("ld.global.") {
                        Some(_) => read(memory, values[1], type_bytes(opcode))?,
                        None => compute(opcode, &values[1..]),
                    };
                    if let Operand::Register(index) = operands[0] {
                        registers[index] = value;
                    }
                }
            }
        }
        Ok(())
    }

    /// The value of a parameter, or the place of a label.
    fn number_of(&self, name: &str, launch: &Launch) -> Option<u64> {
        let param = self.params.iter().position(|param| param == name);
        let value = param.and_then(|index| launch.params.get(index).copied());
        value.or_else(|| self.labels.get(name).map(|&at| at as u64))
    }
}

fn read_instruction(line: &str, names: &mut BTreeMap<String, usize>) -> Option<Instruction> {
    let mut register = |name: &str| {
        let count = names.len();
        *names.entry(name.to_owned()).or_insert(count)
    };
    let (guard, line) = match line.strip_prefix('@') {
        Some(guarded) => {
            let (name, line) = guarded.split_once(' ')?;
            (Some(register(name)), line)
        }
        None => (None, line),
    };
    let (opcode, rest) = line.split_once(' ').unwrap_or((line, ""));
    let mut operands = Vec::new();
    for word in rest.split(", ").filter(|word| !word.is_empty()) {
        let word = word.trim_start_matches('[').trim_end_matches(']');
        operands.push(match word {
            "%ctaid.x" => Operand::Special(Special::Block),
            "%nctaid.x" => Operand::Special(Special::BlockCount),
            "%tid.x" => Operand::Special(Special::Thread),
            "%ntid.x" => Operand::Special(Special::ThreadCount),
            name if name.starts_with('%') => Operand::Register(register(name)),
            hex if hex.starts_with("0x") || hex.starts_with("0f") => {
                Operand::Number(u64::from_str_radix(&hex[2..], 16).ok()?)
            }
            number if number.starts_with(|first: char| first.is_ascii_digit()) => {
                Operand::Number(number.parse().ok()?)
            }
            name => Operand::Name(name.to_owned()),
        });
    }
    let count = match opcode.split('.').next()? {
        "ret" => 0,
        "bra" => 1,
        "ld" | "st" | "mov" | "cvt" => 2,
        "mad" | "selp" => 4,
        _ => 3,
    };
    let instruction = Instruction { guard, opcode: opcode.to_owned(), operands };
    (instruction.operands.len() == count).then_some(instruction)
}

const OPCODES: [&str; 37] = [
    "add.u32",
    "add.u64",
    "and.b32",
    "bra",
    "cvt.f32.f16",
    "cvt.f64.f32",
    "cvt.rn.f16.f32",
    "cvt.rn.f32.f64",
    "cvt.u16.u32",
    "cvt.u32.u16",
    "cvt.u64.u32",
    "ld.global.b16",
    "ld.global.f32",
    "ld.global.f64",
    "ld.global.u16",
    "ld.global.u8",
    "ld.param.u64",
    "mad.lo.u64",
    "mov.b32",
    "mov.b64",
    "mov.u32",
    "mul.f32",
    "mul.wide.u32",
    "or.b32",
    "ret",
    "selp.b16",
    "selp.b32",
    "selp.b64",
    "setp.eq.u32",
    "setp.ge.u64",
    "setp.nan.f32",
    "shl.b16",
    "shl.b32",
    "shr.u32",
    "st.global.b16",
    "st.global.b32",
    "st.global.b64",
];

/// The result of an instruction that touches no memory.
fn compute(opcode: &str, values: &[u64]) -> u64 {
    let word = |index: usize| values[index] as u32;
    let float = |index: usize| f32::from_bits(word(index));
    match opcode {
        "add.u32" => word(0).wrapping_add(word(1)).into(),
        "add.u64" => values[0].wrapping_add(values[1]),
        "and.b32" => (word(0) & word(1)).into(),
        "or.b32" => (word(0) | word(1)).into(),
        "shl.b16" => u64::from((word(0) << word(1)) as u16),
        "shl.b32" => (word(0) << word(1)).into(),
        "shr.u32" => (word(0) >> word(1)).into(),
        "mul.wide.u32" => u64::from(word(0)) * u64::from(word(1)),
        "mul.f32" => (float(0) * float(1)).to_bits().into(),
        "mad.lo.u64" => values[0].wrapping_mul(values[1]).wrapping_add(values[2]),
        "setp.eq.u32" => (word(0) == word(1)).into(),
        "setp.ge.u64" => (values[0] >= values[1]).into(),
        "setp.nan.f32" => (float(0).is_nan() || float(1).is_nan()).into(),
        "selp.b16" | "selp.b32" | "selp.b64" => values[if values[2] != 0 { 0 } else { 1 }],
        "cvt.f32.f16" => widen_half(values[0] as u16).to_bits().into(),
        "cvt.rn.f16.f32" => narrow_to_half(float(0)).into(),
        "cvt.f64.f32" => f64::from(float(0)).to_bits(),
        "cvt.rn.f32.f64" => (f64::from_bits(values[0]) as f32).to_bits().into(),
        "cvt.u16.u32" => u64::from(word(0) as u16),
        "cvt.u32.u16" => u64::from(values[0] as u16),
        "cvt.u64.u32" | "mov.b32" | "mov.u32" => word(0).into(),
        _ => values[0],
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
fn type_bytes(opcode: &str) -> usize {
    let bits = opcode.rsplit(|letter: char| !letter.is_ascii_digit()).next();
    bits.and_then(|bits| bits.parse().ok()).map_or(0, |bits: usize| bits / 8)
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
