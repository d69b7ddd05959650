//! Gives the shared library its soname and version symbols, which rustc does not.

fn main() {
    let dir = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    println!("cargo::rerun-if-changed=libdefuse.map");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libdefuse.so.0");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={dir}/libdefuse.map");
    // Next to the script that rustc writes by itself for its exports, of which one is the default.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--undefined-version");
}
