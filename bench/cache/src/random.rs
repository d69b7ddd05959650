//! Random numbers of the distributions that traces need.

use fastrand::Rng;

/// Numbers from 0 on, of which number n is as likely as 1 / (n + 1)^s.
pub struct ZipfDistribution {
    /// The sum of the likelihoods up to each number.
    sums: Vec<f64>,
}

impl ZipfDistribution {
    pub fn new(count: usize, s: f64) -> ZipfDistribution {
        let mut sum = 0.0;
        let add = |n: usize| {
            sum += (n as f64 + 1.0).powf(-s);
            sum
        };
        ZipfDistribution { sums: (0..count).map(add).collect() }
    }

    pub fn draw(&self, rng: &mut Rng) -> u64 {
        let at = rng.f64() * self.sums.last().copied().unwrap_or(0.0);
        self.sums.partition_point(|sum| *sum < at).min(self.sums.len() - 1) as u64
    }
}

/// A gamma distribution of shape 1.5, the distribution of file sizes in Filebench, with this mean:
/// the sum of an exponential one and of half the square of a normal one.
pub fn gamma(rng: &mut Rng, mean: f64) -> f64 {
    let exponential = -(1.0 - rng.f64()).ln();
    let normal = (-2.0 * (1.0 - rng.f64()).ln()).sqrt() * (std::f64::consts::TAU * rng.f64()).cos();
    (exponential + normal * normal / 2.0) * mean / 1.5
}
