//! Loads every tensor of a checkpoint into memory, and prints the report.
//!
//!     cargo run --release --example load -- PATH [THREADS]

use std::path::Path;

use ckptfs::loader::{BufferAlignment, LoadOptions, TensorBuffer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("give the path of a checkpoint")?;
    let threads = arguments.next().map(|number| number.parse()).transpose()?;
    let model = LoadOptions { threads, ..LoadOptions::default() }.open(Path::new(&path))?;

    let tensors = model.tensors();
    let memory =
        tensors.iter().map(|tensor| TensorBuffer::for_tensor(&tensor.bytes, BufferAlignment::File));
    let mut memory: Vec<TensorBuffer> =
        memory.collect::<Option<_>>().ok_or("too large for memory")?;
    let report =
        model.load_into(tensors.iter().zip(memory.iter_mut().map(|memory| &mut memory[..])))?;

    println!("{} tensors, {} bytes in {:.2} s", report.tensors, report.bytes, report.seconds);
    println!("cached {}, direct {}, buffered {}", report.cached, report.direct, report.buffered);
    Ok(())
}
