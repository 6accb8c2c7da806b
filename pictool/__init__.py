"""pictool"""
