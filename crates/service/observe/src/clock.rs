//! Formats times: UTC, RFC 3339, microseconds.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

/// Prints a time as `2026-11-21T21:39:21.123456Z`.
#[derive(Debug, Clone, Copy)]
pub struct UtcTime(pub SystemTime);

impl fmt::Display for UtcTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self.0.duration_since(UNIX_EPOCH).unwrap_or_default();
        let days = since.as_secs() / 86_400;
        let second = since.as_secs() % 86_400;
        let (year, month, day) = civil_date(days);
        let h = second / 3600;
        let m = second / 60 % 60;
        let s = second % 60;
        write!(f, "{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}.{:06}Z", since.subsec_micros())
    }
}

/// Year, month and day of a number of days since 1970 in the Gregorian calendar, counted from March so that the leap day is the
/// last of the year.
fn civil_date(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let era = z / 146_097;
    let of_era = z % 146_097;
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn known_dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000Z"),
            (1_700_000_000, "2023-11-14T22:13:20.000000Z"),
            (4_107_542_399, "2100-02-28T23:59:59.000000Z"),
        ] {
            assert_eq!(UtcTime(UNIX_EPOCH + Duration::from_secs(seconds)).to_string(), text);
        }
    }
}
