//! Gives the library the name inside that the real one has, and keeps it loaded: who looks whether it is
//! there opens and closes it, and what it has counted must outlive that.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
