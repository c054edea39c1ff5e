from sglang.srt.platforms.interface import SRTPlatform

current_platform: SRTPlatform
