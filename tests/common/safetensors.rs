//! Writes safetensors files with any header.

/// A header of any length and content, and the data behind it.
pub fn raw(stated: u64, header: &[u8], data: &[u8]) -> Vec<u8> {
    [&stated.to_le_bytes(), header, data].concat()
}

/// A file with that header and so many bytes of data, in which no two neighbours are equal.
pub fn file(header: &str, data_len: usize) -> Vec<u8> {
    let data: Vec<u8> = (0..data_len).map(|n| (n % 251) as u8).collect();
    raw(header.len() as u64, header.as_bytes(), &data)
}

/// One entry of a header.
pub fn entry(name: &str, dtype: &str, shape: &str, start: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#)
}

/// A valid file with F32 tensors of these names, each of two elements.
pub fn valid(names: &[&str]) -> Vec<u8> {
    let entries: Vec<String> =
        (0u64..).zip(names).map(|(n, name)| entry(name, "F32", "[2]", n * 8, n * 8 + 8)).collect();
    file(&format!("{{{}}}", entries.join(",")), names.len() * 8)
}
