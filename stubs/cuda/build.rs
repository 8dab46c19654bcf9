//! Gives the library the real one's name inside, and keeps it loaded. A program that probes for it opens and closes
//! it, and its counts must outlive that.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
