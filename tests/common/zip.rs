//! Writes zip archives whose directory may contradict their records.

use super::pickle;

/// Bytes of the record at the very end of an archive without a comment.
pub const END_LEN: usize = 22;

pub const STORED: u16 = 0;
pub const DEFLATED: u16 = 8;

/// The fields that a record's own header and its entry in the directory share.
#[derive(Clone, Debug)]
pub struct Header {
    pub name: Vec<u8>,
    pub flags: u16,
    pub method: u16,
    pub crc: u32,
    pub stored: u32,
    pub size: u32,
    pub extra: Vec<u8>,
}

impl Header {
    fn fixed(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(self.flags.to_le_bytes());
        out.extend(self.method.to_le_bytes());
        out.extend([0; 4]);
        out.extend(self.crc.to_le_bytes());
        out.extend(self.stored.to_le_bytes());
        out.extend(self.size.to_le_bytes());
        out.extend((self.name.len() as u16).to_le_bytes());
        out.extend((self.extra.len() as u16).to_le_bytes());
        out
    }
}

/// A record: its own header, its entry in the directory, its stored bytes.
#[derive(Clone, Debug)]
pub struct Record {
    pub local: Header,
    pub central: Header,
    pub data: Vec<u8>,
    /// The start that the directory states, if it is wrong.
    pub at: Option<u32>,
    /// The disk that the directory states.
    pub disk: u16,
}

impl Record {
    /// A record as torch writes it, except that its sizes are in its own header.
    pub fn stored(name: &str, data: &[u8]) -> Record {
        Record::packed(name, STORED, data.to_vec(), data.len())
    }

    /// A compressed record.
    pub fn deflated(name: &str, data: &[u8]) -> Record {
        let packed = miniz_oxide::deflate::compress_to_vec(data, 6);
        Record::packed(name, DEFLATED, packed, data.len())
    }

    /// A record of any method that states so many bytes of content.
    pub fn packed(name: &str, method: u16, data: Vec<u8>, size: usize) -> Record {
        let header = Header {
            name: name.as_bytes().to_vec(),
            flags: 0,
            method,
            crc: 0x1234_5678,
            stored: data.len() as u32,
            size: size as u32,
            extra: Vec::new(),
        };
        Record { local: header.clone(), central: header, data, at: None, disk: 0 }
    }

    /// Changes both of its headers.
    pub fn both(mut self, change: impl Fn(&mut Header)) -> Record {
        change(&mut self.local);
        change(&mut self.central);
        self
    }
}

/// The parts of an archive before its end record.
pub struct Body {
    pub records: Vec<u8>,
    pub directory: Vec<u8>,
    pub count: u16,
}

/// Writes records and directory.
pub fn body(records: &[Record]) -> Body {
    let mut body = Body { records: Vec::new(), directory: Vec::new(), count: records.len() as u16 };
    for record in records {
        let at = record.at.unwrap_or(body.records.len() as u32);
        body.records.extend(b"PK\x03\x04\x00\x00");
        body.records.extend(record.local.fixed());
        body.records.extend(&record.local.name);
        body.records.extend(&record.local.extra);
        body.records.extend(&record.data);
        body.directory.extend(b"PK\x01\x02\x00\x00\x00\x00");
        body.directory.extend(record.central.fixed());
        body.directory.extend([0; 2]);
        body.directory.extend(record.disk.to_le_bytes());
        body.directory.extend([0; 6]);
        body.directory.extend(at.to_le_bytes());
        body.directory.extend(&record.central.name);
        body.directory.extend(&record.central.extra);
    }
    body
}

/// The end record.
pub fn end(count: u16, directory_len: u32, directory: u32) -> Vec<u8> {
    let mut out = b"PK\x05\x06\x00\x00\x00\x00".to_vec();
    out.extend(count.to_le_bytes());
    out.extend(count.to_le_bytes());
    out.extend(directory_len.to_le_bytes());
    out.extend(directory.to_le_bytes());
    out.extend([0; 2]);
    out
}

/// The zip64 end record and its locator, which states that the record is at `place`.
pub fn wide_end(count: u64, directory_len: u64, directory: u64, place: u64) -> Vec<u8> {
    let mut out = b"PK\x06\x06".to_vec();
    out.extend(44u64.to_le_bytes());
    out.extend([0; 12]);
    out.extend(count.to_le_bytes());
    out.extend(count.to_le_bytes());
    out.extend(directory_len.to_le_bytes());
    out.extend(directory.to_le_bytes());
    out.extend(b"PK\x06\x07\x00\x00\x00\x00");
    out.extend(place.to_le_bytes());
    out.extend(1u32.to_le_bytes());
    out
}

/// A whole archive, consistent as far as its records are.
pub fn archive(records: &[Record]) -> Vec<u8> {
    let Body { records, directory, count } = body(records);
    let end = end(count, directory.len() as u32, records.len() as u32);
    [records, directory, end].concat()
}

/// The six floats of storage `0`.
pub fn floats() -> Vec<u8> {
    (0..6u8).flat_map(|n| f32::from(n).to_le_bytes()).collect()
}

/// The records of a checkpoint with one tensor, `w`: pickle, byte order, storage `0`.
pub fn one_tensor() -> Vec<Record> {
    let state = pickle::dict(&[("w", pickle::Tensor::default().bytes())]);
    checkpoint(&pickle::pickle(&state))
}

/// The records of a checkpoint with any pickle, and storage `0`.
pub fn checkpoint(pickle: &[u8]) -> Vec<Record> {
    vec![
        Record::stored("archive/data.pkl", pickle),
        Record::stored("archive/byteorder", b"little"),
        Record::stored("archive/data/0", &floats()),
    ]
}
