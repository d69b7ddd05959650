//! Random numbers: the generator, and the distributions of the language.

use rand::Rng;
use rand_distr::{Distribution, Exp, Gamma, LogNormal, Normal, Triangular, Uniform, Weibull};

/// The generator of all random numbers. The same seed gives the same numbers on every machine.
pub type RandomGenerator = rand_xoshiro::Xoshiro256PlusPlus;

/// The generator of stream `stream` of a run with `seed`.
pub fn generator(seed: u64, stream: u64) -> RandomGenerator {
    use rand::SeedableRng;
    RandomGenerator::seed_from_u64(seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// The distribution of a random variable.
#[derive(Clone, Debug)]
pub enum RandomDistribution {
    /// Uniform, from the lower to the upper bound.
    Uniform(f64, Uniform<f64>),
    /// Gamma, shifted by an offset.
    Gamma(f64, f64, Gamma<f64>),
    /// Normal, with its mean.
    Normal(f64, Normal<f64>),
    /// Log-normal, with its mean.
    LogNormal(f64, LogNormal<f64>),
    /// Exponential, with its mean.
    Exponential(f64, Exp<f64>),
    /// Triangular, with its mean.
    Triangular(f64, Triangular<f64>),
    /// Weibull, with its mean.
    Weibull(f64, Weibull<f64>),
    /// A table of ranges: the share up to which a row reaches (the last has 1), and its bounds.
    Table(Vec<(f64, f64, f64)>),
}

/// A random variable of a workload file.
#[derive(Clone, Debug)]
pub struct RandomVariable {
    /// The distribution of its values.
    pub shape: RandomDistribution,
    /// Smaller values become this.
    pub min: Option<f64>,
    /// Larger values become this.
    pub max: Option<f64>,
    /// Values are rounded to the nearest multiple of this; 0 for no rounding.
    pub round: f64,
    /// Every value is multiplied by this before rounding.
    pub factor: f64,
}

impl RandomVariable {
    /// A variable of `shape`, without bounds.
    pub fn new(shape: RandomDistribution) -> Self {
        RandomVariable { shape, min: None, max: None, round: 0.0, factor: 1.0 }
    }

    /// The next value.
    pub fn sample(&self, random: &mut RandomGenerator) -> f64 {
        let raw = match &self.shape {
            RandomDistribution::Uniform(_, spread) => spread.sample(random),
            RandomDistribution::Gamma(offset, _, spread) => offset + spread.sample(random),
            RandomDistribution::Normal(_, spread) => spread.sample(random),
            RandomDistribution::LogNormal(_, spread) => spread.sample(random),
            RandomDistribution::Exponential(_, spread) => spread.sample(random),
            RandomDistribution::Triangular(_, spread) => spread.sample(random),
            RandomDistribution::Weibull(_, spread) => spread.sample(random),
            RandomDistribution::Table(rows) => {
                let share: f64 = random.random();
                let row = rows.iter().find(|row| share < row.0).or(rows.last());
                let (_, low, high) = row.copied().unwrap_or((1.0, 0.0, 0.0));
                low + (high - low) * random.random::<f64>()
            }
        };
        let value = self.round(raw) * self.factor;
        let value = self.min.map_or(value, |min| value.max(min * self.factor));
        self.max.map_or(value, |max| value.min(max * self.factor))
    }

    fn round(&self, value: f64) -> f64 {
        if self.round > 0.0 { (value / self.round).round() * self.round } else { value }
    }

    /// The mean of the distribution, without bounds and rounding.
    pub fn mean(&self) -> f64 {
        let mean = match &self.shape {
            RandomDistribution::Uniform(mean, _)
            | RandomDistribution::Normal(mean, _)
            | RandomDistribution::LogNormal(mean, _)
            | RandomDistribution::Exponential(mean, _)
            | RandomDistribution::Triangular(mean, _)
            | RandomDistribution::Weibull(mean, _) => *mean,
            RandomDistribution::Gamma(offset, mean, _) => offset + mean,
            RandomDistribution::Table(rows) => {
                let mut before = 0.0;
                let mut sum = 0.0;
                for (until, low, high) in rows {
                    sum += (until - before) * (low + high) / 2.0;
                    before = *until;
                }
                sum
            }
        };
        mean * self.factor
    }
}

/// A fixed or random number.
#[derive(Clone, Debug)]
pub enum RandomAmount {
    /// A fixed number.
    Fixed(u64),
    /// A new value for each use.
    Random(std::sync::Arc<RandomVariable>),
}

impl RandomAmount {
    /// The fixed number, or the next random one.
    #[inline]
    pub fn get(&self, random: &mut RandomGenerator) -> u64 {
        match self {
            RandomAmount::Fixed(number) => *number,
            // Negative values and NaN become 0.
            RandomAmount::Random(variable) => variable.sample(random) as u64,
        }
    }

    /// The fixed number, or the mean.
    pub fn mean(&self) -> f64 {
        match self {
            RandomAmount::Fixed(number) => *number as f64,
            RandomAmount::Random(variable) => variable.mean(),
        }
    }

    /// The number, if it is fixed.
    pub fn fixed_value(&self) -> Option<u64> {
        match self {
            RandomAmount::Fixed(number) => Some(*number),
            RandomAmount::Random(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean and variance of many values.
    fn moments(variable: &RandomVariable) -> (f64, f64) {
        let mut random = generator(7, 0);
        let values: Vec<f64> = (0..200_000).map(|_| variable.sample(&mut random)).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let square = |value: &f64| (value - mean).powi(2);
        (mean, values.iter().map(square).sum::<f64>() / values.len() as f64)
    }

    fn is_near(found: f64, expected: f64) -> bool {
        (found / expected - 1.0).abs() < 0.03
    }

    #[test]
    fn a_gamma_distribution_has_the_mean_and_the_shape_it_is_given() {
        let (shape, mean) = (1.5, 16_384.0);
        let gamma = Gamma::new(shape, mean / shape).unwrap();
        let found = moments(&RandomVariable::new(RandomDistribution::Gamma(0.0, mean, gamma)));
        assert!(is_near(found.0, mean), "{found:?}");
        assert!(is_near(found.1, mean * mean / shape), "{found:?}");
    }

    #[test]
    fn a_table_gives_each_row_its_share() {
        let rows = vec![(0.8, 0.0, 10.0), (1.0, 100.0, 100.0)];
        let variable = RandomVariable::new(RandomDistribution::Table(rows));
        let mut random = generator(1, 0);
        let large = (0..100_000).filter(|_| variable.sample(&mut random) > 50.0).count();
        assert!(is_near(large as f64, 20_000.0), "{large}");
        assert!(is_near(moments(&variable).0, variable.mean()));
    }

    #[test]
    fn bounds_and_rounding_hold() {
        let mut variable = RandomVariable::new(RandomDistribution::Uniform(
            50.0,
            Uniform::new(0.0, 100.0).unwrap(),
        ));
        (variable.min, variable.max, variable.round) = (Some(20.0), Some(80.0), 16.0);
        let mut random = generator(1, 0);
        for _ in 0..1000 {
            let value = variable.sample(&mut random);
            assert!(value == 20.0 || value % 16.0 == 0.0, "{value}");
            assert!((20.0..=80.0).contains(&value));
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_numbers() {
        let numbers = |seed, stream| {
            let mut random = generator(seed, stream);
            [random.random::<u64>(), random.random()]
        };
        assert_eq!(numbers(1, 2), numbers(1, 2));
        assert_ne!(numbers(1, 2), numbers(1, 3));
        assert_ne!(numbers(1, 2), numbers(2, 2));
    }
}
