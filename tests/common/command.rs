//! Runs the command as a user does, and writes the small models to run it on.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;

use safetensors::Dtype;
use safetensors::tensor::TensorView;

/// Exit code and output of a command.
#[derive(Debug)]
pub struct Outcome {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// The command under test.
pub fn ckptfs() -> &'static str {
    env!("CARGO_BIN_EXE_ckptfs")
}

/// Copies a program so that every user may run it. Another process writes the copy. A file that is open for writing
/// cannot be run, and children of other tests inherit what this process has open.
pub fn install(program: impl AsRef<Path>, at: impl AsRef<Path>) {
    let mut install = Command::new("install");
    let outcome =
        install.args(["-m", "755"]).args([program.as_ref(), at.as_ref()]).status().unwrap();
    assert!(outcome.success());
}

/// Runs the command under test.
pub fn run(args: &[&str]) -> Outcome {
    run_command(Command::new(ckptfs()).args(args))
}

/// Runs a script, which finds the command as `$CKPTFS` and its arguments as `$1` and on.
pub fn run_in_shell(mut shell: Command, script: &str, args: &[&str]) -> Outcome {
    run_command(shell.args(["-c", script, "bash"]).args(args).env("CKPTFS", ckptfs()))
}

/// The folder of the logs of daemons that tests start, instead of one in the user's home.
pub fn state_folder() -> &'static str {
    concat!(env!("CARGO_TARGET_TMPDIR"), "/state")
}

/// Runs a command to its end.
pub fn run_command(command: &mut Command) -> Outcome {
    if !command.get_envs().any(|(name, _)| name == "XDG_STATE_HOME") {
        command.env("XDG_STATE_HOME", state_folder());
    }
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    // A process ended by a signal has no exit code; shells report at least 128.
    let code = output.status.code().unwrap_or(128);
    let outcome = Outcome { code, stdout: text(output.stdout), stderr: text(output.stderr) };
    assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
    outcome
}

/// The path of a name in a directory, as text.
pub fn path(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().to_owned()
}

/// The sorted names in a directory.
pub fn names_in(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// Writes a safetensors file of tensors of so many bytes, and gives their contents.
pub fn write_model(path: &Path, tensors: usize, bytes: usize) -> Vec<(String, Vec<u8>)> {
    let data = |n: usize| (0..bytes).map(|at| (at * 7 + n * 13) as u8).collect();
    let tensors: Vec<(String, Vec<u8>)> =
        (0..tensors).map(|n| (format!("layer.{n}.weight"), data(n))).collect();
    let views = tensors
        .iter()
        .map(|(n, d)| (n.clone(), TensorView::new(Dtype::U8, vec![bytes], d).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
    tensors
}

/// The two shards of a model, with one tensor each: every byte is `fill` in the first and `fill + 1` in the
/// second.
pub fn two_shards(fill: u8, bytes: usize) -> Vec<(String, Vec<u8>)> {
    let shard = |n: u8| {
        let data = vec![fill + n; bytes];
        let view = TensorView::new(Dtype::U8, vec![bytes], &data).unwrap();
        let file = safetensors::serialize([(format!("layer.{n}.weight"), view)], None).unwrap();
        (format!("model-0000{}-of-00002.safetensors", n + 1), file)
    };
    vec![shard(0), shard(1)]
}

/// Writes a legacy torch checkpoint with one square float matrix, transposed. The file has a hole where its
/// bytes would be.
pub fn write_transposed(path: &Path, side: u64) {
    let mut out = BufWriter::new(File::create(path).unwrap());
    let text = |text: &str| {
        [b"X".as_slice(), &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
    };
    let int = |n: u64| [b"J".as_slice(), &(n as u32).to_le_bytes()].concat();
    out.write_all(b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.").unwrap();
    out.write_all(b"\x80\x02M\xe9\x03.").unwrap();
    out.write_all(b"\x80\x02}.").unwrap();
    let state = [
        b"\x80\x02}(".to_vec(),
        text("weight"),
        b"ctorch._utils\n_rebuild_tensor_v2\n((".to_vec(),
        text("storage"),
        b"ctorch\nFloatStorage\n".to_vec(),
        text("0"),
        text("cpu"),
        int(side * side),
        b"NtQK\x00".to_vec(),
        [int(side), int(side), b"\x86".to_vec()].concat(),
        [b"K\x01".to_vec(), int(side), b"\x86".to_vec()].concat(),
        b"\x89ccollections\nOrderedDict\n)RtRu.".to_vec(),
    ];
    out.write_all(&state.concat()).unwrap();
    out.write_all(&[b"\x80\x02]".as_slice(), &text("0"), b"a."].concat()).unwrap();
    out.write_all(&(side * side).to_le_bytes()).unwrap();
    let file = out.into_inner().unwrap();
    let header = file.metadata().unwrap().len();
    file.set_len(header + side * side * 4).unwrap();
}
