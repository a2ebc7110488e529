//! Medians, spreads, and figures for display. Knows no measurement.

/// The middle of the values (or the mean of the two middle values); 0 of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|v| !v.is_nan()).collect();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// The median of a figure over runs.
pub fn median_of<T>(runs: &[T], figure: impl Fn(&T) -> f64) -> f64 {
    median(&runs.iter().map(figure).collect::<Vec<_>>())
}

/// The same over the runs that have the figure; `None` without such a run.
pub fn median_known<T>(runs: &[T], figure: impl Fn(&T) -> Option<f64>) -> Option<f64> {
    let known: Vec<f64> = runs.iter().filter_map(figure).collect();
    (!known.is_empty()).then(|| median(&known))
}

/// The value that this share of all values does not exceed; 0 of none.
pub fn percentile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let index = ((sorted.len() as f64 * share) as usize).min(sorted.len().saturating_sub(1));
    sorted.get(index).copied().unwrap_or(0.0)
}

/// The smallest and the largest; zeros of none.
pub fn spread(values: &[f64]) -> (f64, f64) {
    let mut kept = values.iter().copied().filter(|v| !v.is_nan());
    let Some(first) = kept.next() else { return (0.0, 0.0) };
    kept.fold((first, first), |(low, high), v| (low.min(v), high.max(v)))
}

/// A figure of a table; a dash where unknown.
pub fn known_digits(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), three_digits)
}

/// Bytes in GiB, never zero.
pub fn gib(bytes: u64) -> f64 {
    bytes.max(1) as f64 / f64::from(1u32 << 30)
}

/// Three significant digits: `4.12`, `41.2`, `412`, `0.041`.
pub fn three_digits(value: f64) -> String {
    let magnitude = value.abs();
    let digits = match magnitude {
        m if m >= 99.95 || m == 0.0 => 0,
        m if m >= 9.995 => 1,
        m if m >= 0.9995 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// A count with thousands: `950`, `31.2k`, `1.05M`.
pub fn short_count(value: f64) -> String {
    match value {
        v if v >= 999_500.0 => format!("{}M", three_digits(v / 1e6)),
        v if v >= 9_995.0 => format!("{}k", three_digits(v / 1e3)),
        v => format!("{v:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0]), 3.0);
        assert_eq!(median(&[5.0, 1.0, 3.0]), 3.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(&[f64::NAN, 2.0]), 2.0);
        assert_eq!(spread(&[2.0, 9.0, 1.0]), (1.0, 9.0));
        assert_eq!(spread(&[]), (0.0, 0.0));
        assert_eq!(median_known(&[1.0, 4.0, 9.0], |v| (*v > 2.0).then_some(*v)), Some(6.5));
        assert_eq!((percentile(&[3.0, 1.0, 2.0], 0.5), percentile(&[], 0.5)), (2.0, 0.0));
    }

    #[test]
    fn figures() {
        let cases = [(0.0, "0"), (0.0414, "0.041"), (1.0, "1.00"), (4.126, "4.13"), (41.26, "41.3"), (412.6, "413")];
        for (value, text) in cases {
            assert_eq!(three_digits(value), text);
        }
        let counts =
            [(950.0, "950"), (9_994.0, "9994"), (31_234.0, "31.2k"), (999_600.0, "1.00M"), (1_050_000.0, "1.05M")];
        for (value, text) in counts {
            assert_eq!(short_count(value), text);
        }
    }
}
