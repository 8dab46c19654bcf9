//! The Rust library loads a checkpoint by its URL, and reads its virtual file, as it does by its path.
//!
//! A program of its own, because the options of stores belong to the process.

#![cfg(feature = "remote")]
#![allow(clippy::unwrap_used)] // Also in functions beside the tests: a failed one fails the test.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;

use ckptfs::loader::{BufferAlignment, TensorBuffer};
use ckptfs::source::{RemoteOverrides, set_remote_options};
use common::command::write_model;

/// Each tensor is larger than what the first request brings.
const TENSOR_COUNT: usize = 3;
const TENSOR_BYTES: usize = 5 << 20;

/// Answers one request for a file, by a range if it has one.
fn answer(mut stream: TcpStream, file: &[u8]) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap()?;
    let mut range = None;
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if let Some((start, end)) =
            line.strip_prefix("range: bytes=").and_then(|text| text.split_once('-'))
        {
            range = Some(start.parse().unwrap()..end.parse::<usize>().unwrap() + 1);
        }
        if line.is_empty() {
            break;
        }
    }
    if !request.contains(" /model.safetensors ") {
        return stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
    }
    let status = if range.is_some() { "206 Partial Content" } else { "200 OK" };
    let range = range.unwrap_or(0..file.len());
    let body = &file[range.start..range.end.min(file.len())];
    write!(
        stream,
        "HTTP/1.1 {status}\r\nETag: \"a\"\r\nConnection: close\r\nContent-Length: {}\r\nContent-Range: bytes {}-{}/{}\r\n\r\n",
        body.len(),
        range.start,
        range.start + body.len() - 1,
        file.len(),
    )?;
    if request.starts_with("GET") { stream.write_all(body) } else { Ok(()) }
}

/// The address of a web server with one file.
fn serve(file: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let file = Arc::new(file);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let file = Arc::clone(&file);
            // A client that disconnects ends only its own answer.
            std::thread::spawn(move || answer(stream.unwrap(), &file).ok());
        }
    });
    format!("http://{address}/model.safetensors")
}

#[test]
fn a_url_is_read_as_a_path_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let expected = write_model(&path, TENSOR_COUNT, TENSOR_BYTES);
    let url = serve(std::fs::read(&path).unwrap());
    let url = Path::new(&url);

    let refused = ckptfs::open(url).unwrap_err();
    assert!(refused.to_string().contains("not encrypted"), "{refused}");
    set_remote_options(RemoteOverrides {
        allow_http: Some(true),
        no_cache: Some(true),
        ..RemoteOverrides::default()
    });

    let model = ckptfs::open(url).unwrap();
    assert_eq!(model.tensors().len(), TENSOR_COUNT);
    for (name, bytes) in &expected {
        let loaded = model.load(model.tensor(name).unwrap()).unwrap();
        assert_eq!(&loaded[..], &bytes[..], "{name}");
    }
    let mut memory: Vec<TensorBuffer> = model
        .tensors()
        .iter()
        .map(|tensor| TensorBuffer::for_tensor(&tensor.bytes, BufferAlignment::File).unwrap())
        .collect();
    let targets = model.tensors().iter().zip(memory.iter_mut().map(|memory| &mut memory[..]));
    let report = model.load_into(targets).unwrap();
    assert_eq!(report.remote, (TENSOR_COUNT * TENSOR_BYTES) as u64);
    for (tensor, memory) in model.tensors().iter().zip(&memory) {
        let (_, bytes) = expected.iter().find(|(name, _)| **name == *tensor.name).unwrap();
        assert_eq!(&memory[..], &bytes[..], "{}", tensor.name);
    }

    let [remote, local] = [url, &path].map(|path| {
        let checkpoint = ckptfs::checkpoint::open(path, &Default::default()).unwrap();
        common::whole(&common::reader(checkpoint))
    });
    assert!(remote == local, "the virtual files differ");
}
