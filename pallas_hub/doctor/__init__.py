"""What is installed, what the machine offers, what would run here, and what is wrong, in plain words.

diagnose()   every finding, as a list; nothing is changed, no TPU is initialised, no optional package is needed
"""

from pallas_hub.doctor.diagnose import diagnose, summary, text
from pallas_hub.doctor.finding import Finding

__all__ = ["Finding", "diagnose", "summary", "text"]
