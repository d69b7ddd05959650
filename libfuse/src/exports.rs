//! The names and versions of exported functions.

/// Exports functions by versioned names, `name@VERSION` or, for the version that new programs are
/// linked with, `name@@VERSION`. Each row has a symbol of its own, which jumps to the function. The
/// version script of the library names the versions.
#[macro_export]
macro_rules! export {
    ($($own:literal $symbol:literal => $function:path;)*) => {
        $(
            #[cfg(target_arch = "x86_64")]
            ::core::arch::global_asm!(
                concat!(".pushsection .text.", $own, ",\"ax\",@progbits"),
                concat!(".globl ", $own),
                concat!(".type ", $own, ",@function"),
                concat!($own, ":"),
                "jmp {function}",
                concat!(".size ", $own, ",.-", $own),
                concat!(".symver ", $own, ",", $symbol),
                ".popsection",
                function = sym $function,
            );
        )*
        /// The symbols of this library, as `name@VERSION` or `name@@VERSION`.
        pub const SYMBOLS: &[&str] = &[$($symbol),*];
    };
}
