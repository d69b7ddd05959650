//! Gives the shared library its soname, which rustc does not.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libdefuse.so.0");
}
