//! The `ckptfs` command.

fn main() -> std::process::ExitCode {
    ckptfs::cli::main()
}
