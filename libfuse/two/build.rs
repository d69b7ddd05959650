//! Names the library, and the versions of its symbols.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=versions.map");
    let folder = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfuse.so.2");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--version-script={folder}/versions.map");
}
