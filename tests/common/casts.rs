//! A checkpoint whose tensors are cast as they are loaded, for tests of loads to devices.

use std::path::{Path, PathBuf};

use ckptfs::checkpoint::Tensor;
use ckptfs::loader::{LoadOptions, LoadRecipe, OpenCheckpoint};

use super::safetensors::{entry, raw};
use super::samples::{bytes, directory};

/// The types that devices cast from, with the bytes of a value, and those that they cast to.
const SOURCE_DTYPES: [(&str, usize); 6] =
    [("F64", 8), ("F32", 4), ("F16", 2), ("BF16", 2), ("F8_E5M2", 1), ("F8_E4M3", 1)];
const TARGET_DTYPES: [(&str, &str); 4] =
    [("F64", "float64"), ("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")];

/// A tensor of this many bytes, which is not cast, has the first cast cross the end of an extent.
const PADDING_BYTES: usize = (4 << 20) - (70 << 10);

/// The number of values that only the host casts: integers, and values that begin at an odd place.
const HOST_VALUES: u64 = 300;

/// Tensors that adjoin in the file and on a device, where they have a multiple of its alignment.
const ADJOINING_COUNT: usize = 4;
const ADJOINING_VALUES: usize = 128;

/// The pairs of a source type and another type.
pub const CAST_COUNT: usize = 20;

/// A tensor for each cast, of every value of a small type and of many of a large one.
pub fn checkpoint_of_casts(large_count: usize) -> (tempfile::TempDir, PathBuf) {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    let mut add = |name: &str, dtype: &str, value_bytes: usize, values: &[u8]| {
        let start = data.len() as u64;
        data.extend(values);
        let shape = format!("[{}]", values.len() / value_bytes);
        entries.push(entry(name, dtype, &shape, start, data.len() as u64));
    };
    add("padding", "U8", 1, &vec![7; PADDING_BYTES]);
    for (number, (from, value_bytes)) in SOURCE_DTYPES.into_iter().enumerate() {
        let values: Vec<u8> = match value_bytes {
            1 => (0..=255).collect(),
            2 => (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
            _ => special_values(value_bytes)
                .chain(bytes(large_count * value_bytes, number as u64))
                .collect(),
        };
        for (to, _) in TARGET_DTYPES.into_iter().filter(|(to, _)| *to != from) {
            add(&format!("{from}.{to}"), from, value_bytes, &values);
        }
    }
    for number in 0..ADJOINING_COUNT {
        add(&format!("{number}.F32"), "F16", 2, &bytes(ADJOINING_VALUES * 2, number as u64));
    }
    let integers = bytes(HOST_VALUES as usize * 4, 8);
    add("I32.F64", "I32", 4, &integers);
    add("one", "U8", 1, &[1]);
    add("odd.F32.F16", "F32", 4, &integers);
    let header = format!("{{{}}}", entries.join(","));
    let header = format!("{header:<width$}", width = header.len().next_multiple_of(8));
    let folder = directory();
    let path = folder.path().join("casts.safetensors");
    std::fs::write(&path, raw(header.len() as u64, header.as_bytes(), &data)).unwrap();
    (folder, path)
}

/// Floats at ties, overflow and subnormals, and NaNs; as f64 also the value behind each.
fn special_values(value_bytes: usize) -> impl Iterator<Item = u8> {
    let halves = (0..=u16::MAX).step_by(37).chain([0x7f80, 0x7f7f, 0x477f, 0x3300, 0x8000, 0x0001]);
    let floats = halves.flat_map(|upper| {
        let rests = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1000, 0x2fff];
        rests.map(|rest| f32::from_bits(u32::from(upper) << 16 | rest))
    });
    floats.flat_map(move |float| match value_bytes {
        4 => float.to_le_bytes().to_vec(),
        _ => [f64::from(float), f64::from(float) * (1.0 + f64::EPSILON)]
            .into_iter()
            .flat_map(f64::to_le_bytes)
            .collect(),
    })
}

/// Opens such a checkpoint with the recipe that casts each tensor to what its name ends with.
pub fn open_cast(path: &Path) -> OpenCheckpoint {
    let rules = TARGET_DTYPES
        .map(|(to, name)| format!(r#"{{"tensors": "*.{to}", "to": "{name}", "optional": true}}"#));
    let recipe = LoadRecipe::parse_json(&format!(r#"{{"cast": [{}]}}"#, rules.join(","))).unwrap();
    LoadOptions { recipe: Some(recipe.into()), ..LoadOptions::default() }.open(path).unwrap()
}

/// Bytes cast on a device, and on the host, by a load of such a checkpoint.
pub fn expected_cast_bytes(opened: &OpenCheckpoint) -> [u64; 2] {
    let is_cast = |tensor: &&Tensor| tensor.name.contains('.');
    let all: u64 = opened.tensors().iter().filter(is_cast).map(|tensor| tensor.bytes.len()).sum();
    let host = HOST_VALUES * (8 + 2);
    [all - host, host]
}
