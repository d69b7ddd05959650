//! Files whose content follows from their names.

/// The content of a file by its name, of less than `most` bytes.
pub fn make_content(text: &str, most: usize) -> Vec<u8> {
    let seed = text.bytes().fold(7, |seed: u64, byte| seed.wrapping_mul(31) + u64::from(byte));
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; random.usize(1..most)];
    random.fill(&mut bytes);
    bytes
}
