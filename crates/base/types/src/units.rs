//! Sizes and durations as written on a command line or in a config file.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes, written with a unit: `4096B`, `64K`, `4M`, `4MiB`, `1.5G` (powers of 1024). Only 0 has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Size(pub u64);

impl Size {
    /// `n` mebibytes.
    pub const fn mib(n: u64) -> Self {
        Size(n << 20)
    }
    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

/// Whether a number without a unit means the same in every unit.
fn is_zero(number: &str) -> bool {
    number.parse() == Ok(0.0)
}

/// Why a size or a duration did not parse: the given text, the fault, and valid examples.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UnitError(String);

impl FromStr for Size {
    type Err = UnitError;
    fn from_str(s: &str) -> Result<Self, UnitError> {
        let t = s.trim();
        let split = t.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(t.len());
        let (number, suffix) = t.split_at(split);
        if number.is_empty() {
            return Err(invalid_size(s, "it does not start with a digit"));
        }
        let shift = match suffix.trim().to_ascii_lowercase().as_str() {
            "" if is_zero(number) => 0,
            "" => {
                return Err(invalid_size(s, &format!("it has no unit; did you mean {number}M? ({number}B are bytes)")));
            }
            "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            "p" | "pb" | "pib" => 50,
            other => return Err(invalid_size(s, &format!("unknown unit '{other}'"))),
        };
        let bytes = if let Ok(whole) = number.parse::<u64>() {
            whole.checked_mul(1u64 << shift).ok_or_else(|| invalid_size(s, "it is larger than 16 EiB"))?
        } else {
            let fraction = number.parse::<f64>().map_err(|_| invalid_size(s, "the number does not parse"))?;
            let bytes = fraction * (1u64 << shift) as f64;
            if bytes >= u64::MAX as f64 {
                return Err(invalid_size(s, "it is larger than 16 EiB"));
            }
            bytes as u64
        };
        Ok(Size(bytes))
    }
}

fn invalid_size(s: &str, why: &str) -> UnitError {
    UnitError(format!("'{s}' is not a size: {why}; write 64K, 4M, 4MiB, 1.5G (powers of 1024) or 4096B"))
}

impl fmt::Display for Size {
    /// The shortest form that parses back to the same number if possible (`4M`), else bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(50, "P"), (40, "T"), (30, "G"), (20, "M"), (10, "K")] {
            if self.0 >= 1 << shift && self.0.is_multiple_of(1 << shift) {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        let unit = if self.0 == 0 { "" } else { "B" };
        write!(f, "{}{unit}", self.0)
    }
}

impl serde::Serialize for Size {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Size {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

/// `bytes` for a person: three significant digits and a binary unit (`3.21 GiB`).
pub fn human_bytes(bytes: u64) -> String {
    const SIZE_UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit < SIZE_UNITS.len() - 1 {
        value /= 1024.0;
        unit += 1;
    }
    match (unit, value) {
        (0, v) => format!("{v:.0} B"),
        (u, v) if v >= 100.0 => format!("{v:.0} {}", SIZE_UNITS[u]),
        (u, v) if v >= 10.0 => format!("{v:.1} {}", SIZE_UNITS[u]),
        (u, v) => format!("{v:.2} {}", SIZE_UNITS[u]),
    }
}

/// Deadlines further away than this could not be computed from now.
const LONGEST_DURATION: Duration = Duration::from_secs(100 * 366 * 86_400);

/// Parses `250ms`, `5s`, `5m`, `2h`, `1h30m` or `1d`. Only 0 needs no unit.
///
/// # Errors
/// When the text is no number with one of these units.
pub fn parse_duration(s: &str) -> Result<Duration, UnitError> {
    let mut rest = s.trim();
    let mut seconds = 0.0;
    loop {
        let split = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, tail) = rest.split_at(split);
        let value: f64 = number.parse().map_err(|_| invalid_duration(s, "it does not start with a number"))?;
        let (unit, next) = tail.split_at(tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len()));
        let scale = match unit.trim().to_ascii_lowercase().as_str() {
            "us" => 1e-6,
            "ms" => 1e-3,
            "" if is_zero(number) && next.is_empty() => 1.0,
            "" => return Err(invalid_duration(s, &format!("{number} has no unit; did you mean {number}s?"))),
            "s" | "sec" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            "d" => 86_400.0,
            other => return Err(invalid_duration(s, &format!("unknown unit '{other}'"))),
        };
        seconds += value * scale;
        rest = next;
        if rest.is_empty() {
            if seconds > LONGEST_DURATION.as_secs_f64() {
                return Err(invalid_duration(s, "it is longer than 100 years"));
            }
            return Duration::try_from_secs_f64(seconds).map_err(|_| invalid_duration(s, "it is out of range"));
        }
    }
}

fn invalid_duration(s: &str, why: &str) -> UnitError {
    UnitError(format!("'{s}' is not a duration: {why}; write 250ms, 5s, 5m, 1h30m or 1d"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in
            [("0", 0), ("4096B", 4096), ("64K", 65536), ("4MiB", 4 << 20), ("1.5g", 3 << 29), (" 2 TB ", 2 << 40)]
        {
            assert_eq!(text.parse::<Size>().unwrap().0, bytes, "{text}");
        }
        for text in ["", "M", "4X", "1.2.3", "-1", "99999999999T", "4M4", "4096", "1.5"] {
            let error = text.parse::<Size>().unwrap_err().to_string();
            assert!(error.contains("is not a size") && error.contains("4MiB"), "{error}");
        }
        let without_unit = "8192".parse::<Size>().unwrap_err().to_string();
        assert!(without_unit.contains("it has no unit; did you mean 8192M? (8192B are bytes)"), "{without_unit}");
        assert_eq!(Size::mib(4).to_string(), "4M");
        assert_eq!(Size(4097).to_string(), "4097B");
        assert_eq!(human_bytes(3 << 30), "3.00 GiB");
    }

    #[test]
    fn durations() {
        for (text, ms) in [
            ("250ms", 250),
            ("5s", 5000),
            ("5m", 300_000),
            ("0", 0),
            ("0.5s", 500),
            ("1d", 86_400_000),
            ("5m0s", 300_000),
            ("1h30m", 5_400_000),
        ] {
            assert_eq!(parse_duration(text).unwrap().as_millis(), ms, "{text}");
        }
        for text in ["", "s", "5 parsecs", "-1s", "1e400d", "10000000000000000000", "36601d", "2", "0.5", "1h30"] {
            assert!(parse_duration(text).unwrap_err().to_string().contains("is not a duration"), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn display_parses_back(n: u64) {
            proptest::prop_assert_eq!(Size(n).to_string().parse::<Size>().unwrap(), Size(n));
        }
        #[test]
        fn never_panics(s in ".{0,16}") {
            let _ = s.parse::<Size>();
            let _ = parse_duration(&s);
        }
    }
}
