//! Sizes as people write them: parsing, bounds and formatting.

/// Parses `512M`, `2G` or `64KiB`. Units are powers of 1024; `KB`, `MB`, `GB` and `TB` are powers of 1000. A size that
/// overflows becomes `u64::MAX`, which no bound admits.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (base, power) = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => (1, 0),
        "k" | "kib" => (1024, 1),
        "m" | "mib" => (1024, 2),
        "g" | "gib" => (1024, 3),
        "t" | "tib" => (1024, 4),
        "kb" => (1000, 1),
        "mb" => (1000, 2),
        "gb" => (1000, 3),
        "tb" => (1000, 4),
        _ => return Err("a size is a number and K, M, G or T, such as 512M".to_owned()),
    };
    if number.is_empty() {
        return Err("a size begins with a number".to_owned());
    }
    // Only too many digits fail to parse.
    let number: u64 = number.parse().unwrap_or(u64::MAX);
    Ok(number.saturating_mul(u64::pow(base, power)))
}

/// Parses a size and checks its bounds.
pub fn parse_size_within(text: &str, least: u64, greatest: u64) -> Result<u64, String> {
    match parse_size(text)? {
        size if size < least => Err(format!("too small: at least {}", format_size(least))),
        size if size > greatest => Err(format!("too large: at most {}", format_size(greatest))),
        size => Ok(size),
    }
}

/// Formats a size as the command line takes it: exactly in the largest unit, or rounded down by less than a tenth.
pub fn format_size(size: u64) -> String {
    let (name, unit) = size_unit(size);
    format!("{}{name}", size / unit)
}

/// Formats a size as [`format_size`] does, but rounded up.
#[cfg(feature = "remote")]
pub fn format_size_up(size: u64) -> String {
    let (name, unit) = size_unit(size);
    format!("{}{name}", size.div_ceil(unit))
}

fn size_unit(size: u64) -> (&'static str, u64) {
    let units = [("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10), ("", 1)];
    let fits = |unit: u64| size >= 10 * unit || (size >= unit && size.is_multiple_of(unit));
    units.into_iter().find(|&(_, unit)| fits(unit)).unwrap_or(("", 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_what_people_mean() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("128K", 128 << 10),
            ("64 KiB", 64 << 10),
            ("512m", 512 << 20),
            ("2G", 2 << 30),
            ("2GB", 2_000_000_000),
            ("1T", 1 << 40),
            ("99999999999T", u64::MAX),
            ("99999999999999999999", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "G", "-1", "1.5G", "1X", "1 000"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bounds_are_printed_as_valid_sizes() {
        let within = |text| parse_size_within(text, 16 << 20, 24 << 30);
        assert_eq!((within("16M"), within("24G")), (Ok(16 << 20), Ok(24 << 30)));
        assert_eq!(within("5").unwrap_err(), "too small: at least 16M");
        for text in ["25G", "99999999999999999999"] {
            assert_eq!(within(text).unwrap_err(), "too large: at most 24G");
        }
        for limit in [0, 1, 1023, 65_536, 1 << 20, 10 << 30, (10 << 30) - 1, 25_000_000_000] {
            let printed = parse_size(&format_size(limit)).unwrap();
            assert!(
                printed <= limit && limit - printed <= limit / 10,
                "{limit}: {}",
                format_size(limit)
            );
        }
    }
}
